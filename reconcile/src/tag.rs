//! The tag: the comment by which an order is recognised at the broker.
//!
//! Shape, always 24 ASCII characters: `L`, the link in 8 base-36 digits, the master ticket in
//! 13, and 2 check digits. Fits the shortest comment field known (26, CASES.md P3).
//!
//! Invariants:
//! 1. Two different (link, master ticket) never have the same tag, and decoding gives back
//!    what was encoded (S15).
//! 2. Only the exact text is a tag: no prefix, no suffix, no other case (H52).
//! 3. A comment is untrusted: no content of it can panic or allocate.
//!
//! Not covered: comments that a broker rewrote (`[sl]`, `from #n`, blank). Those trades are
//! found by pair, lineage and magic; [`remnant`] gives a hint that may only hold an open back.

use schemas::planted::{self, Bug};
use schemas::{LinkId, MasterTicket};
use std::fmt;

/// Characters in a tag.
pub const TAG_LEN: usize = 24;

const LINK_DIGITS: usize = 8;
const TICKET_DIGITS: usize = 13;
const CHECK_DIGITS: usize = 2;
const MARK: u8 = b'L';
const DIGITS: &[u8; 36] = b"0123456789abcdefghijklmnopqrstuvwxyz";

/// First link id that does not fit into a tag: 36^8.
const LINK_END: u64 = 36u64.pow(LINK_DIGITS as u32);
/// Check values: 36^2.
const CHECK_END: u64 = 36u64.pow(CHECK_DIGITS as u32);
/// Largest prime below 36^2, so that a changed digit and two exchanged digits both show.
const CHECK_MODULUS: u64 = 1291;

/// A link whose orders cannot be tagged. The link is refused; nothing is opened for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("link must be below {LINK_END} to fit into an order's tag, got {0}")]
pub struct TagError(pub LinkId);

/// The comment of one order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tag([u8; TAG_LEN]);

impl Tag {
    /// The text.
    pub fn as_str(&self) -> &str {
        std::str::from_utf8(&self.0).expect("a tag is made of ASCII digits and letters")
    }
}

impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Refuses a link id that does not fit into a tag.
pub fn check_link(link: LinkId) -> Result<(), TagError> {
    if link.get() < LINK_END { Ok(()) } else { Err(TagError(link)) }
}

/// The tag of the copy of one master ticket on one link.
pub fn encode(link: LinkId, ticket: MasterTicket) -> Result<Tag, TagError> {
    check_link(link)?;
    let mut text = [MARK; TAG_LEN];
    let (link_end, ticket_end) = (1 + LINK_DIGITS, 1 + LINK_DIGITS + TICKET_DIGITS);
    write_digits(link.get(), &mut text[1..link_end]);
    write_digits(ticket.get(), &mut text[link_end..ticket_end]);
    let check = check_value(&text[1..ticket_end]);
    write_digits(check, &mut text[ticket_end..]);
    Ok(Tag(text))
}

/// Link and master ticket of a comment that is exactly a tag; nothing for any other text.
pub fn decode(comment: &str) -> Option<(LinkId, MasterTicket)> {
    if planted::is(Bug::P8) {
        return remnant(comment); // the rest of the comment is not looked at
    }
    decode_bytes(comment.as_bytes())
}

/// Link and master ticket of a comment that begins with a whole tag and goes on, as brokers
/// that append `[sl]` leave it. A hint: enough to hold an open back, not to adopt or close.
pub fn remnant(comment: &str) -> Option<(LinkId, MasterTicket)> {
    decode_bytes(comment.as_bytes().get(..TAG_LEN)?)
}

/// Whether the tags of two tickets of one link begin alike: all but the last digit and the check.
pub(crate) fn begin_alike(one: MasterTicket, other: MasterTicket) -> bool {
    one.get() / 36 == other.get() / 36
}

fn decode_bytes(text: &[u8]) -> Option<(LinkId, MasterTicket)> {
    if text.len() != TAG_LEN || text[0] != MARK {
        return None;
    }
    let (body, check) = text[1..].split_at(LINK_DIGITS + TICKET_DIGITS);
    if read_digits(check)? != check_value(body) {
        return None;
    }
    let (link, ticket) = body.split_at(LINK_DIGITS);
    let link = LinkId::new(read_digits(link)?).ok()?;
    let ticket = MasterTicket::new(read_digits(ticket)?).ok()?;
    Some((link, ticket))
}

fn write_digits(mut value: u64, to: &mut [u8]) {
    for place in to.iter_mut().rev() {
        *place = DIGITS[(value % 36) as usize];
        value /= 36;
    }
}

fn read_digits(text: &[u8]) -> Option<u64> {
    text.iter().try_fold(0u64, |value, byte| {
        let digit = match byte {
            b'0'..=b'9' => byte - b'0',
            b'a'..=b'z' => byte - b'a' + 10,
            _ => return None,
        };
        value.checked_mul(36)?.checked_add(u64::from(digit))
    })
}

/// The digits' weighted sum: weights grow by the factor 37, all different below the modulus.
fn check_value(body: &[u8]) -> u64 {
    // Every comment of a history is read at every plan: one division for eight bytes, not for each.
    let sum = body.chunks(8).fold(1u64, |sum, bytes| {
        bytes.iter().fold(sum, |sum, byte| sum * 37 + u64::from(*byte)) % CHECK_MODULUS
    });
    debug_assert!(sum < CHECK_END, "two digits hold the check value");
    sum
}
