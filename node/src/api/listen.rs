//! Connections of the API: bounded in number, and in how long any of them may stand still.
//!
//! Invariants:
//! 1. At most [`CONNECTIONS_MAX`] are open; who comes then waits in the system's queue.
//! 2. One that does not say its request within [`HEADER_LIMIT`], or takes no more of its answer for
//!    [`WRITE_LIMIT`], is closed (H76): slow clients hold a place for a bounded time, and nothing else.

use crate::causes::with_causes;
use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::Sleep;

/// Connections that are open at once.
pub const CONNECTIONS_MAX: usize = 128;
/// The longest that the head of a request may take, idle time between two requests included.
pub const HEADER_LIMIT: Duration = Duration::from_secs(10);
/// The longest that a client may take no more bytes.
pub const WRITE_LIMIT: Duration = Duration::from_secs(10);
/// Pause after a connection could not be taken: the process has no more files, say.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// How long a client may stand still.
#[derive(Debug, Clone, Copy)]
pub(super) struct Patience {
    header: Duration,
    write: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Patience { header: HEADER_LIMIT, write: WRITE_LIMIT }
    }
}

/// Takes connections until it is dropped.
pub(super) async fn serve(listener: TcpListener, router: Router, patience: Patience) {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        let socket = match listener.accept().await {
            Ok((socket, _)) => socket,
            Err(error) => {
                tracing::warn!(error = %with_causes(&error), "the API took no connection");
                tokio::time::sleep(ACCEPT_RETRY).await;
                continue;
            }
        };
        let service = TowerToHyperService::new(router.clone());
        tokio::spawn(async move {
            let _place = place;
            let connection = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(patience.header)
                .serve_connection(TokioIo::new(Patient::new(socket, patience.write)), service);
            if let Err(error) = connection.await {
                tracing::debug!(error = %with_causes(&error), "a connection of the API ended");
            }
        });
    }
}

/// A socket that has patience with its reader for a while only.
struct Patient {
    socket: TcpStream,
    patience: Duration,
    /// When the bytes that wait must have left.
    limit: Option<Pin<Box<Sleep>>>,
}

impl Patient {
    fn new(socket: TcpStream, patience: Duration) -> Self {
        Patient { socket, patience, limit: None }
    }

    /// Passes on what the socket says, or the end of patience.
    fn judged<T>(
        &mut self,
        cx: &mut Context<'_>,
        said: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if said.is_ready() {
            self.limit = None;
            return said;
        }
        let patience = self.patience;
        let limit = self.limit.get_or_insert_with(|| Box::pin(tokio::time::sleep(patience)));
        ready!(limit.as_mut().poll(cx));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl AsyncRead for Patient {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_read(cx, into)
    }
}

impl AsyncWrite for Patient {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let said = Pin::new(&mut self.socket).poll_write(cx, bytes);
        self.judged(cx, said)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let said = Pin::new(&mut self.socket).poll_write_vectored(cx, parts);
        self.judged(cx, said)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let said = Pin::new(&mut self.socket).poll_flush(cx);
        self.judged(cx, said)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let said = Pin::new(&mut self.socket).poll_shutdown(cx);
        self.judged(cx, said)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::routing::get;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    const SHORT: Patience =
        Patience { header: Duration::from_millis(400), write: Duration::from_millis(400) };
    /// A test that waits for longer than this has failed.
    const LIMIT: Duration = Duration::from_secs(20);

    /// More than the buffers of two sockets hold.
    const LARGE: usize = 32 * 1024 * 1024;

    async fn served(patience: Patience) -> std::net::SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let large = get(|| async { "x".repeat(LARGE) });
        let router = Router::new().route("/", get(|| async { "here" })).route("/large", large);
        tokio::spawn(serve(listener, router, patience));
        address
    }

    async fn ask(address: std::net::SocketAddr, text: &str) -> TcpStream {
        let mut socket = TcpStream::connect(address).await.unwrap();
        socket.write_all(text.as_bytes()).await.unwrap();
        socket
    }

    async fn answer(mut socket: TcpStream) -> String {
        let mut text = Vec::new();
        // A connection that is cut ends with an error or with nothing.
        let _cut = socket.read_to_end(&mut text).await;
        String::from_utf8(text).unwrap()
    }

    const WHOLE: &str = "GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";

    #[tokio::test]
    async fn a_client_that_does_not_finish_its_request_is_cut_off_and_others_are_served() {
        let address = served(SHORT).await;
        let slow = ask(address, "GET / HT").await;
        assert!(answer(ask(address, WHOLE).await).await.ends_with("here"));
        let cut = tokio::time::timeout(LIMIT, answer(slow)).await.expect("it is cut off");
        assert!(!cut.contains("here"), "{cut}");
    }

    #[tokio::test]
    async fn a_client_that_reads_nothing_is_cut_off() {
        let address = served(SHORT).await;
        let lazy = ask(address, &WHOLE.replace("GET /", "GET /large")).await;
        // Nothing tells the client that it was cut off, as long as it reads nothing.
        tokio::time::sleep(SHORT.write * 5).await;
        assert!(answer(lazy).await.len() < LARGE, "it got all of it");
    }

    #[tokio::test]
    async fn who_comes_when_all_places_are_taken_is_served_when_one_is_free() {
        let address = served(Patience::default()).await;
        let mut idle = Vec::new();
        for _ in 0..CONNECTIONS_MAX {
            idle.push(ask(address, "GET").await);
        }
        let mut late = tokio::spawn(answer(ask(address, WHOLE).await));
        let waits = tokio::time::timeout(Duration::from_millis(300), &mut late).await;
        waits.expect_err("there is no place");
        drop(idle);
        let served = tokio::time::timeout(LIMIT, late).await.expect("there is a place");
        assert!(served.unwrap().ends_with("here"));
    }
}
