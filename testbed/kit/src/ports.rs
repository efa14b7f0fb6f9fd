//! Ports for daemons. A port stays reserved for its daemon while the daemon is restarted and nothing listens
//! there.
//!
//! Ports come from below the kernel's ephemeral range: the kernel may use a port of that range for any outgoing
//! connection before the daemon listens on it. Concurrent testbeds reserve ports in blocks. The owner of a
//! block listens on an abstract Unix socket named after the block, which ends with the process and leaves no
//! file.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::ops::Range;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener};

use anyhow::{Result, bail};
use parking_lot::Mutex;

const PORTS: Range<u16> = 15_000..32_000;
/// Ports of one block.
const BLOCK: u16 = 100;

/// The ports of this process, reserved as long as it lives.
static OWN: Mutex<Own> = Mutex::new(Own {
    sockets: Vec::new(),
    left: 0..0,
});

struct Own {
    sockets: Vec<UnixListener>,
    /// The ports of the last block that are still free.
    left: Range<u16>,
}

/// A port on loopback that no other testbed gets while this process lives.
pub fn free_address() -> Result<SocketAddr> {
    let mut own = OWN.lock();
    loop {
        for port in own.left.by_ref() {
            // A program outside the testbed may listen at the port.
            if let Ok(listener) = TcpListener::bind((Ipv4Addr::LOCALHOST, port)) {
                return Ok(listener.local_addr()?);
            }
        }
        own.take_block()?;
    }
}

impl Own {
    /// Takes the first free block of ports. A socket of a fixed name keeps other processes of the testbed away from it.
    fn take_block(&mut self) -> Result<()> {
        for first in PORTS.step_by(usize::from(BLOCK)) {
            let name = UnixAddr::from_abstract_name(format!("gpushare-testbed-ports-{first}"))?;
            if let Ok(socket) = UnixListener::bind_addr(&name) {
                self.sockets.push(socket);
                self.left = first..first + BLOCK;
                return Ok(());
            }
        }
        bail!("no port of {PORTS:?} on 127.0.0.1 is free")
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::{BLOCK, PORTS, UnixAddr, UnixListener, free_address};
    use std::os::linux::net::SocketAddrExt;

    #[test]
    fn no_port_is_given_twice_or_used_by_another_process() {
        // As another process would have it.
        let others = PORTS.step_by(usize::from(BLOCK)).find_map(|first| {
            let name = UnixAddr::from_abstract_name(format!("gpushare-testbed-ports-{first}")).unwrap();
            Some((first..first + BLOCK, UnixListener::bind_addr(&name).ok()?))
        });
        let (others, _socket) = others.unwrap();
        let n = 2 * usize::from(BLOCK);
        let ports: BTreeSet<u16> = (0..n).map(|_| free_address().unwrap().port()).collect();
        assert_eq!(ports.len(), n);
        assert!(
            ports
                .iter()
                .all(|port| PORTS.contains(port) && !others.contains(port))
        );
    }
}
