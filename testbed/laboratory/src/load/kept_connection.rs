//! One kept-alive connection over which requests go one after the other, as from kube-scheduler to an extender.
//!
//! Blocking and without an HTTP library, so that the client costs next to nothing.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

/// The longest wait for an answer.
const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub(super) struct KeptConnection {
    stream: BufReader<TcpStream>,
    /// The line of an answer's head that was read last.
    head: String,
    body: Vec<u8>,
}

/// The bytes of an HTTP request that posts JSON.
pub(super) fn wire(path: &str, body: &[u8]) -> Vec<u8> {
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: gpushare\r\nUser-Agent: testbed\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

impl KeptConnection {
    pub(super) fn to(address: SocketAddr) -> Result<Self> {
        let stream = TcpStream::connect(address).with_context(|| format!("cannot connect to {address}"))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        Ok(Self {
            stream: BufReader::with_capacity(64 << 10, stream),
            head: String::new(),
            body: Vec::new(),
        })
    }

    /// Sends a request and waits for the whole answer, which must be a 200.
    pub(super) fn ask(&mut self, wire: &[u8]) -> Result<&[u8]> {
        self.stream.get_mut().write_all(wire)?;
        self.read_line()?;
        ensure!(
            self.head.split(' ').nth(1) == Some("200"),
            "the answer is {:?}",
            self.head.trim()
        );
        let mut length = None;
        loop {
            self.read_line()?;
            match self.head.trim().split_once(':') {
                None => break,
                Some((name, value)) if name.eq_ignore_ascii_case("content-length") => {
                    length = value.trim().parse().ok();
                }
                Some(_) => {}
            }
        }
        // The extender sends the length of each answer.
        let length: usize = length.context("the answer does not say how long it is")?;
        self.body.resize(length, 0);
        self.stream
            .read_exact(&mut self.body)
            .context("the answer breaks off")?;
        Ok(&self.body)
    }

    /// Reads the next line of the answer's head into `head`.
    fn read_line(&mut self) -> Result<()> {
        self.head.clear();
        if self.stream.read_line(&mut self.head)? == 0 {
            bail!("the connection is closed");
        }
        Ok(())
    }
}
