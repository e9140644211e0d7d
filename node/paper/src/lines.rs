//! Cuts a byte stream into lines, with a bound on the length of one.
//!
//! Invariants:
//! 1. Memory is bounded by the longest allowed line plus one read.
//! 2. A line that is too long is reported once and skipped to its end; the stream goes on.

use bytes::{Buf, Bytes, BytesMut};

/// One line, or the notice that one was too long.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Line {
    /// Without its line end.
    Complete(Bytes),
    /// Skipped.
    TooLong,
}

/// What was read and not yet taken.
#[derive(Debug)]
pub(crate) struct LineBuffer {
    buf: BytesMut,
    scanned: usize,
    skipping: bool,
    bytes_max: usize,
}

impl LineBuffer {
    pub(crate) fn new(bytes_max: usize) -> Self {
        Self { buf: BytesMut::with_capacity(8192), scanned: 0, skipping: false, bytes_max }
    }

    /// Where the next read goes.
    pub(crate) fn space(&mut self) -> &mut BytesMut {
        self.buf.reserve(8192);
        &mut self.buf
    }

    /// The next line, if there is a whole one.
    pub(crate) fn next(&mut self) -> Option<Line> {
        loop {
            let Some(found) = self.buf[self.scanned..].iter().position(|b| *b == b'\n') else {
                self.scanned = self.buf.len();
                if self.scanned <= self.bytes_max {
                    return None;
                }
                self.buf.clear();
                self.scanned = 0;
                let reported = std::mem::replace(&mut self.skipping, true);
                return if reported { None } else { Some(Line::TooLong) };
            };
            let mut line = self.buf.split_to(self.scanned + found).freeze();
            self.buf.advance(1);
            self.scanned = 0;
            if std::mem::take(&mut self.skipping) {
                continue;
            }
            if line.len() > self.bytes_max {
                return Some(Line::TooLong);
            }
            if line.last() == Some(&b'\r') {
                line.truncate(line.len() - 1);
            }
            if !line.is_empty() {
                return Some(Line::Complete(line));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn feed(buffer: &mut LineBuffer, bytes: &[u8]) -> Vec<Line> {
        buffer.space().extend_from_slice(bytes);
        std::iter::from_fn(|| buffer.next()).collect()
    }

    fn complete(text: &'static str) -> Line {
        Line::Complete(Bytes::from_static(text.as_bytes()))
    }

    #[test]
    fn lines_come_out_whole_however_they_arrive() {
        let mut buffer = LineBuffer::new(100);
        assert_eq!(feed(&mut buffer, b"ab"), vec![]);
        assert_eq!(feed(&mut buffer, b"c\r\n\nd\ne"), vec![complete("abc"), complete("d")]);
        assert_eq!(feed(&mut buffer, b"f\n"), vec![complete("ef")]);
    }

    #[test]
    fn a_line_that_is_too_long_is_reported_once_and_the_next_one_is_read() {
        let mut buffer = LineBuffer::new(4);
        assert_eq!(feed(&mut buffer, b"123456"), vec![Line::TooLong]);
        assert_eq!(feed(&mut buffer, b"7890123"), vec![]);
        assert_eq!(feed(&mut buffer, b"45\nok\n"), vec![complete("ok")]);
        assert_eq!(feed(&mut buffer, b"123456\nok\n"), vec![Line::TooLong, complete("ok")]);
    }
}
