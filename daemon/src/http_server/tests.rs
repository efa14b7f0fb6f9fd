//! Timeouts of connections, in paused time: long between requests, short within the head of one.

use std::time::Duration;

use axum::Router;
use axum::routing::get;
use hyper_util::server::graceful::GracefulShutdown;
use proptest::prelude::*;
use rstest::rstest;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::conversation::{Conversation, KEEP_ALIVE};
use super::{ConnectionSettings, HttpServer, marks};

const REQUEST: &str = "GET / HTTP/1.1\r\nhost: x\r\n\r\n";
/// A request that is answered after 30 s.
const SLOW: &str = "GET /slow HTTP/1.1\r\nhost: x\r\n\r\n";

/// The client's end of a connection on which a head may take 10 s.
fn connect() -> DuplexStream {
    let slow = async || {
        sleep(Duration::from_secs(30)).await;
        "slow"
    };
    let router = Router::new()
        .route("/", get(async || "quick"))
        .route("/slow", get(slow))
        .route("/large", get(async || vec![b'x'; 1 << 20]));
    let (client, server) = tokio::io::duplex(4096);
    let connection = ConnectionSettings {
        router,
        tls: None,
        read_timeout: Duration::from_secs(10),
    };
    tokio::spawn(async move {
        // If it were dropped, the connection would end.
        let graceful = GracefulShutdown::new();
        connection
            .serve_http1(
                server,
                marks(([127, 0, 0, 1], 1).into(), None),
                Conversation::new([127, 0, 0, 1].into(), Duration::from_secs(10), false),
                graceful.watcher(),
            )
            .await;
    });
    client
}

async fn ask(client: &mut DuplexStream, request: &str) -> String {
    client.write_all(request.as_bytes()).await.unwrap();
    let mut reply = vec![0; 4096];
    let n = client.read(&mut reply).await.unwrap();
    String::from_utf8(reply[..n].to_vec()).unwrap()
}

/// Seconds until the server hangs up, without a word.
async fn seconds_to_end(client: &mut DuplexStream) -> u64 {
    let since = Instant::now();
    let mut rest = Vec::new();
    timeout(Duration::from_secs(3600), client.read_to_end(&mut rest))
        .await
        .expect("the server should hang up")
        .unwrap();
    assert!(rest.is_empty(), "{rest:?}");
    since.elapsed().as_secs()
}

/// Go keeps an idle connection for 90 s, and kube-scheduler does not repeat a POST that meets its end.
#[rstest]
#[case::quick_answer(REQUEST)]
#[case::slow_answer(SLOW)]
#[tokio::test(start_paused = true)]
async fn idle_connections_are_kept_longer_than_a_go_client_keeps_them(#[case] first: &str) {
    let mut client = connect();
    for request in [first, REQUEST, first] {
        let reply = ask(&mut client, request).await;
        assert!(reply.starts_with("HTTP/1.1 200 OK"), "{reply}");
        sleep(Duration::from_secs(95)).await;
    }
    assert!(ask(&mut client, REQUEST).await.ends_with("quick"));
    assert_eq!(seconds_to_end(&mut client).await, 130);
}

/// A laptop that went to sleep in the middle of a view kept what the view was made with for ever.
#[tokio::test(start_paused = true)]
async fn the_connection_of_a_client_that_does_not_read_is_closed() {
    let mut client = connect();
    client
        .write_all(b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n")
        .await
        .unwrap();
    let mut taken = vec![0; 4096];
    for _ in 0..10 {
        sleep(Duration::from_secs(25)).await;
        assert!(
            client.read(&mut taken).await.unwrap() > 0,
            "a slow client is served"
        );
    }
    sleep(Duration::from_secs(31)).await;
    let mut rest = Vec::new();
    client.read_to_end(&mut rest).await.unwrap();
    assert!(rest.len() <= 4096, "{} bytes", rest.len());
}

#[rstest]
#[case::nothing("")]
#[case::half_a_line("GET / HT")]
#[case::half_a_head("GET / HTTP/1.1\r\nhost: x\r\n")]
#[tokio::test(start_paused = true)]
async fn the_timeout_of_the_first_request_begins_with_the_connection(#[case] sent: &str) {
    let mut client = connect();
    sleep(Duration::from_secs(4)).await;
    client.write_all(sent.as_bytes()).await.unwrap();
    assert_eq!(seconds_to_end(&mut client).await, 6);
}

/// A client can keep an idle HTTP/2 connection open with pings, so the time limit counts requests alone.
#[tokio::test(start_paused = true)]
async fn a_connection_of_http2_is_overdue_without_requests() {
    let head = Duration::from_secs(10);
    let since = Instant::now();
    let conversation = Conversation::new([127, 0, 0, 1].into(), head, false);
    conversation.clone().overdue().await;
    assert_eq!(since.elapsed(), head);
    let answering = conversation.answering();
    let an_hour = Duration::from_secs(3600);
    assert!(timeout(an_hour, conversation.clone().overdue()).await.is_err());
    drop(answering);
    let since = Instant::now();
    conversation.overdue().await;
    assert_eq!(since.elapsed(), KEEP_ALIVE);
}

#[tokio::test(start_paused = true)]
async fn the_timeout_of_a_later_request_begins_with_its_first_byte() {
    let mut client = connect();
    ask(&mut client, REQUEST).await;
    sleep(Duration::from_secs(119)).await;
    let since = Instant::now();
    for piece in ["GET ", "/ ", "HTTP/1.1\r\n"] {
        client.write_all(piece.as_bytes()).await.unwrap();
        sleep(Duration::from_secs(3)).await;
    }
    assert_eq!(seconds_to_end(&mut client).await, 1);
    assert_eq!(since.elapsed(), Duration::from_secs(10));
}

#[tokio::test(start_paused = true)]
async fn pipelined_requests_are_both_answered() {
    let mut client = connect();
    client
        .write_all([SLOW, REQUEST].concat().as_bytes())
        .await
        .unwrap();
    let mut replies = String::new();
    client.read_to_string(&mut replies).await.unwrap();
    assert_eq!(replies.matches("HTTP/1.1 200 OK").count(), 2, "{replies}");
    assert!(replies.ends_with("quick"), "{replies}");
}

#[tokio::test]
async fn a_reset_answers_running_requests_and_closes_idle_connections() {
    let release = std::sync::Arc::new(tokio::sync::Notify::new());
    let (held, started) = (release.clone(), std::sync::Arc::new(tokio::sync::Notify::new()));
    let starting = started.clone();
    let slow = move || {
        let (held, starting) = (held.clone(), starting.clone());
        async move {
            starting.notify_one();
            held.notified().await;
            "slow"
        }
    };
    let router = Router::new()
        .route("/", get(async || "quick"))
        .route("/slow", get(slow))
        .route("/large", get(async || vec![b'x'; 1 << 20]));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (hang_up, hangups) = watch::channel(0);
    let server = HttpServer {
        connection_resets: hangups,
        ..HttpServer::new(listener, router, 8)
    };
    tokio::spawn(server.serve(CancellationToken::new()));
    let (mut idle, mut busy) = (
        TcpStream::connect(address).await.unwrap(),
        TcpStream::connect(address).await.unwrap(),
    );
    let mut reply = vec![0; 4096];
    idle.write_all(REQUEST.as_bytes()).await.unwrap();
    assert!(idle.read(&mut reply).await.unwrap() > 0);
    busy.write_all(SLOW.as_bytes()).await.unwrap();
    started.notified().await;
    hang_up.send(1).unwrap();
    let rest = idle.read_to_end(&mut reply);
    timeout(Duration::from_secs(10), rest)
        .await
        .expect("an idle connection should end")
        .unwrap();
    release.notify_one();
    let mut text = String::new();
    timeout(Duration::from_secs(10), busy.read_to_string(&mut text))
        .await
        .expect("the other should end too")
        .unwrap();
    assert!(
        text.contains("connection: close") && text.ends_with("slow"),
        "{text}"
    );
    assert!(TcpStream::connect(address).await.is_ok(), "new ones are welcome");
}

/// Connects from an address of this machine.
async fn connect_from(address: [u8; 4], server: std::net::SocketAddr) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind((address, 0).into()).unwrap();
    socket.connect(server).await.unwrap()
}

/// 80 connections that send nothing, or keep a request's connection, from four addresses, against 16 places.
#[rstest]
#[case::silent("")]
#[case::half_a_head("GET / HT")]
#[case::idle(REQUEST)]
#[tokio::test]
async fn idle_clients_keep_no_other_client_out(#[case] sent: &str) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let server = listener.local_addr().unwrap();
    let router = Router::new().route("/", get(async || "quick"));
    let serving = HttpServer::new(listener, router, 16).serve(CancellationToken::new());
    tokio::spawn(serving);
    let mut regular = connect_from([127, 0, 0, 9], server).await;
    let mut attackers = Vec::new();
    for at in (0..4_u8).cycle().take(80) {
        let mut attacker = connect_from([127, 0, 0, 2 + at], server).await;
        attacker.write_all(sent.as_bytes()).await.unwrap();
        attackers.push(attacker);
        // The connection of a client that asks now and then stays, and a new client gets one.
        let mut probe = connect_from([127, 0, 0, 8], server).await;
        for client in [&mut regular, &mut probe] {
            client.write_all(REQUEST.as_bytes()).await.unwrap();
            let mut reply = vec![0; 4096];
            let read = timeout(Duration::from_secs(10), client.read(&mut reply));
            let n = read.await.expect("an answer in time").unwrap();
            assert!(reply[..n].ends_with(b"quick"));
        }
    }
}

/// Requests as clients send them, to be damaged.
fn requests() -> Vec<Vec<u8>> {
    let requests = [
        REQUEST,
        "POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nhelloGET / HTTP/1.1\r\nhost: x\r\n\r\n",
        "POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n5;a=b\r\nhello\r\n0\r\nt: v\r\n\r\n",
        "GET / HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ];
    requests.map(|request| request.as_bytes().to_vec()).to_vec()
}

proptest! {
    #![proptest_config(fuzz::config(500))]

    /// Every connection ends, with answers of HTTP or with none.
    #[test]
    fn no_bytes_make_a_connection_panic_or_hang(bytes in fuzz::damaged(requests())) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        let answer = runtime.block_on(async {
            let (mut reader, mut writer) = tokio::io::split(connect());
            let mut answer = Vec::new();
            let sending = async {
                // The server may end the connection before it has read all.
                let _ = writer.write_all(&bytes).await;
                let _ = writer.shutdown().await;
            };
            let ((), read) = tokio::join!(sending, timeout(Duration::from_secs(3600), reader.read_to_end(&mut answer)));
            read.map(|_| answer)
        });
        let answer = answer.expect("the connection ends");
        prop_assert!(answer.is_empty() || answer.starts_with(b"HTTP/1."), "{:?}", String::from_utf8_lossy(&answer));
    }
}
