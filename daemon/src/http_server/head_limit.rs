//! Ends HTTP/1.1 connections of clients that do not send the head (request line and headers) of a request in time, or read
//! nothing of an answer. Idle connections stay.
//!
//! hyper's timer runs from the end of one request to the head of the next, so it cannot distinguish an idle connection from a
//! client that stopped in the middle of a head. [`HeadLimit`] sees the bytes as they arrive, and [`Conversation`] knows when a
//! request is being answered. Neither parses HTTP.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep_until};

use super::conversation::Conversation;

/// Time for which a client may read nothing of its answer: until it is read, the answer takes memory.
const STALL: Duration = Duration::from_secs(30);

/// A stream that ends when a head is overdue, as if the client had closed it, and fails when the client reads nothing for long.
#[derive(Debug)]
pub(super) struct HeadLimit<S> {
    stream: S,
    conversation: Conversation,
    /// The timer of the head that the client is sending.
    overdue: Pin<Box<Sleep>>,
    /// The timer of the present write; `None` while no write waits for the client.
    stalled: Option<Pin<Box<Sleep>>>,
}

impl<S> HeadLimit<S> {
    /// Limits the heads and writes of `stream`, the stream of the connection whose stage `conversation` shows.
    pub(super) fn new(stream: S, conversation: Conversation) -> Self {
        Self {
            stream,
            conversation,
            // Set to the end of a head before it is first polled.
            overdue: Box::pin(sleep_until(Instant::now())),
            stalled: None,
        }
    }

    /// Returns ready when the head that the client is sending is overdue.
    fn poll_overdue(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(until) = self.conversation.head_until() else {
            return Poll::Pending;
        };
        // The stage may have changed since the timer was set, and one timer serves all heads of a connection.
        if self.overdue.deadline() != until {
            self.overdue.as_mut().reset(until);
        }
        self.overdue.as_mut().poll(cx)
    }

    /// Passes on the result of a write, or an error if the write has been waiting for too long.
    fn limit_write<T>(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.stalled = None;
            return written;
        }
        let until = Instant::now() + STALL;
        let stalled = self.stalled.get_or_insert_with(|| Box::pin(sleep_until(until)));
        let text = "the client reads nothing of its answer";
        let is_over = stalled.as_mut().poll(cx);
        is_over.map(|()| Err(io::Error::new(io::ErrorKind::TimedOut, text)))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for HeadLimit<S> {
    /// Reads from the stream, and notes the arrival of bytes. While none arrive, an overdue head ends the stream.
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let n_before = buf.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, buf);
        if read.is_pending() {
            // To hyper, a read that is ready without bytes is the end of the stream.
            return self.poll_overdue(cx).map(Ok);
        }
        if buf.filled().len() > n_before {
            self.conversation.note_bytes();
        }
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for HeadLimit<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.limit_write(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.limit_write(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
