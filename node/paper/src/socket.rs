//! Socket settings of both ends, and the abortive close.
//!
//! Bytes that the other end does not acknowledge within `UNACKED_LIMIT` end the connection: an
//! order must not arrive long after it was written. The kernel measures this, not the process.

use std::io;
use std::time::Duration;
use tokio::net::TcpStream;

/// Longest time that written bytes may stay unacknowledged. Chosen below fence plus settle.
pub(crate) const UNACKED_LIMIT: Duration = Duration::from_secs(5);
/// Silence after which the kernel asks whether the other end is still there.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(2);
/// Time between two such questions.
const KEEPALIVE_EVERY: Duration = Duration::from_secs(1);
/// Questions without answer until the connection counts as dead.
const KEEPALIVE_MISSES_MAX: u32 = 3;

pub(crate) fn tune(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let limit_ms = u32::try_from(UNACKED_LIMIT.as_millis()).expect("a constant of seconds");
    rustix::net::sockopt::set_socket_keepalive(stream, true)?;
    rustix::net::sockopt::set_tcp_keepidle(stream, KEEPALIVE_IDLE)?;
    rustix::net::sockopt::set_tcp_keepintvl(stream, KEEPALIVE_EVERY)?;
    rustix::net::sockopt::set_tcp_keepcnt(stream, KEEPALIVE_MISSES_MAX)?;
    rustix::net::sockopt::set_tcp_user_timeout(stream, limit_ms)?;
    Ok(())
}

/// Ends the connection at once: what the kernel still holds is thrown away and the other end gets
/// a reset. Works while other tasks hold the socket; it is closed when the last of them lets go.
pub(crate) fn abort(stream: &TcpStream) {
    let linger = rustix::net::sockopt::set_socket_linger(stream, Some(Duration::ZERO));
    let reset = rustix::net::connect_unspec(stream);
    for failed in [linger, reset].into_iter().filter_map(Result::err) {
        tracing::debug!(error = %failed, "abortive close of a connection that was already gone");
    }
}
