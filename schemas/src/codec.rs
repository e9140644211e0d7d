//! MessagePack in and out: named maps, strict values, unknown fields ignored.
//!
//! Inputs are bytes from the bus, which are not trusted. Outputs are valid values
//! or a `DecodeError` that names the field.
//!
//! Invariants:
//! 1. Decoding never panics and never allocates more than a small multiple of the input,
//!    which is at most `MESSAGE_BYTES_MAX`.
//! 2. An unknown field is ignored (a field may be added), an unknown kind or version is an
//!    error (it advances nothing and counts as a gap).
//! 3. What is encoded here decodes to an equal value.

use crate::book::{Book, Digest};
use crate::control::{ControlReply, ControlRequest};
use crate::event::{Beacon, Change, CloseReason, TradeEvent};
use crate::ids::{AccountId, Epoch, Micros, Seq};
use crate::position::{Funds, MasterPending, MasterPosition};
use crate::quantity::{Lots, Price};
use crate::snapshot::MasterSnapshot;
use serde::{Deserialize, Serialize};

/// Version of the contract that this build speaks.
pub const VERSION: u8 = 1;

/// Largest message that is decoded: the default payload limit of a NATS server.
pub const MESSAGE_BYTES_MAX: usize = 1024 * 1024;

/// Trades and orders in one page of a snapshot: about 250 bytes each, well under the payload limit.
pub const SNAPSHOT_PAGE_ROWS: usize = 1000;

/// Pages of one snapshot: a larger account is refused, not read in part.
pub const SNAPSHOT_PAGES_MAX: u32 = 1000;

/// Why bytes are not a message. The caller drops the message and treats it as a gap.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// Larger than any message of the contract.
    #[error("message has {bytes} bytes, at most {MESSAGE_BYTES_MAX} are allowed")]
    TooLarge {
        /// Size of the message.
        bytes: usize,
    },
    /// A version this build does not speak.
    #[error("field v: version {version} is not spoken here, only {VERSION}")]
    Version {
        /// The version of the message.
        version: u64,
    },
    /// A kind this build does not know.
    #[error("field kind: {kind:?} is not a kind of trade event")]
    Kind {
        /// The kind of the message, shortened.
        kind: String,
    },
    /// A field is missing, of a wrong type or out of its range.
    #[error("field {field}: {problem}")]
    Field {
        /// Path of the field, such as `position.lots`.
        field: String,
        /// What is wrong, with the value where it is known.
        problem: String,
    },
}

impl DecodeError {
    fn missing(field: &'static str, kind: &'static str) -> Self {
        DecodeError::Field { field: field.into(), problem: format!("{kind} needs it") }
    }
}

/// What is asked of a message that is not one, before its fields are.
#[derive(Deserialize)]
struct Header<'a> {
    v: u64,
    #[serde(default, borrow)]
    kind: Option<&'a str>,
}

/// A message that says which contract it is of.
trait Versioned {
    /// Whether its kind has to be one of [`EVENT_KINDS`].
    const IS_EVENT: bool = false;

    fn version(&self) -> u8;
}

#[derive(Serialize, Deserialize)]
struct WireEvent<'a> {
    v: u8,
    kind: &'a str,
    account: AccountId,
    epoch: Epoch,
    seq: Seq,
    at_us: Micros,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    position: Option<MasterPosition>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pending: Option<MasterPending>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    previous_lots: Option<Lots>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    close_price: Option<Price>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    close_reason: Option<CloseReason>,
}

#[derive(Serialize, Deserialize)]
struct WireBeacon {
    v: u8,
    account: AccountId,
    epoch: Epoch,
    seq: Seq,
    at_us: Micros,
    open_trades: u32,
    open_pendings: u32,
    digest: Digest,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    funds: Option<Funds>,
}

/// A request for a snapshot; the reply subject of the message says where it goes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotRequest {
    /// Version of the contract.
    pub v: u8,
    /// The master.
    pub account: AccountId,
    /// Highest epoch that the asker heard. Absent: none yet, or an asker that does not say it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heard: Option<Epoch>,
}

/// One page of a snapshot. All pages of one snapshot are taken at one (epoch, seq).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotPage {
    /// Version of the contract.
    pub v: u8,
    /// The master.
    pub account: AccountId,
    /// Incarnation of the publisher.
    pub epoch: Epoch,
    /// Last event that is contained.
    pub seq: Seq,
    /// When it was taken (publisher's clock).
    pub at_us: Micros,
    /// Number of this page, from 0.
    pub page: u32,
    /// How many pages there are; at least 1.
    pub pages: u32,
    /// The publisher's own read was complete. A publisher that cannot say so does not reply.
    pub complete: bool,
    /// Digest of the whole state, the same on every page.
    pub digest: Digest,
    /// Trades of this page.
    pub positions: Vec<MasterPosition>,
    /// Pending orders of this page.
    pub pendings: Vec<MasterPending>,
    /// Money of the account, where the platform says it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub funds: Option<Funds>,
}

/// Encodes an event.
pub fn encode_event(event: &TradeEvent) -> Vec<u8> {
    let mut wire = WireEvent {
        v: VERSION,
        kind: event.change.kind(),
        account: event.account,
        epoch: event.epoch,
        seq: event.seq,
        at_us: event.at,
        position: None,
        pending: None,
        previous_lots: None,
        close_price: None,
        close_reason: None,
    };
    match &event.change {
        Change::PositionOpened(p) | Change::PositionModified(p) | Change::PendingFilled(p) => {
            wire.position = Some(p.clone());
        }
        Change::VolumeChanged { position, previous_lots } => {
            wire.position = Some(position.clone());
            wire.previous_lots = Some(*previous_lots);
        }
        Change::PositionClosed { position, price, reason } => {
            wire.position = Some(position.clone());
            wire.close_price = *price;
            wire.close_reason = Some(*reason);
        }
        Change::PendingPlaced(o) | Change::PendingModified(o) | Change::PendingCancelled(o) => {
            wire.pending = Some(o.clone());
        }
    }
    to_named(&wire)
}

/// Decodes an event.
pub fn decode_event(bytes: &[u8]) -> Result<TradeEvent, DecodeError> {
    let wire: WireEvent<'_> = from_versioned(bytes)?;
    let kind = known_kind(wire.kind)?;
    if wire.seq == Seq::ZERO {
        return Err(DecodeError::Field {
            field: "seq".into(),
            problem: "events count from 1, got 0".into(),
        });
    }
    let position = wire.position.ok_or(DecodeError::missing("position", kind));
    let pending = wire.pending.ok_or(DecodeError::missing("pending", kind));
    let change = match kind {
        "position_opened" => Change::PositionOpened(position?),
        "position_modified" => Change::PositionModified(position?),
        "volume_changed" => Change::VolumeChanged {
            position: position?,
            previous_lots: wire.previous_lots.ok_or(DecodeError::missing("previous_lots", kind))?,
        },
        "position_closed" => Change::PositionClosed {
            position: position?,
            price: wire.close_price,
            reason: wire.close_reason.unwrap_or(CloseReason::Unknown),
        },
        "pending_placed" => Change::PendingPlaced(pending?),
        "pending_modified" => Change::PendingModified(pending?),
        "pending_cancelled" => Change::PendingCancelled(pending?),
        _ => Change::PendingFilled(position?),
    };
    Ok(TradeEvent {
        account: wire.account,
        epoch: wire.epoch,
        seq: wire.seq,
        at: wire.at_us,
        change,
    })
}

/// Every kind of trade event of this version.
pub const EVENT_KINDS: [&str; 8] = [
    "position_opened",
    "position_modified",
    "volume_changed",
    "position_closed",
    "pending_placed",
    "pending_modified",
    "pending_cancelled",
    "pending_filled",
];

fn known_kind(kind: &str) -> Result<&'static str, DecodeError> {
    EVENT_KINDS
        .into_iter()
        .find(|known| *known == kind)
        .ok_or_else(|| DecodeError::Kind { kind: crate::ids::shorten(kind) })
}

/// Encodes a beacon.
pub fn encode_beacon(beacon: &Beacon) -> Vec<u8> {
    to_named(&WireBeacon {
        v: VERSION,
        account: beacon.account,
        epoch: beacon.epoch,
        seq: beacon.seq,
        at_us: beacon.at,
        open_trades: beacon.open_trades,
        open_pendings: beacon.open_pendings,
        digest: beacon.digest,
        funds: beacon.funds.clone(),
    })
}

/// Decodes a beacon.
pub fn decode_beacon(bytes: &[u8]) -> Result<Beacon, DecodeError> {
    let wire: WireBeacon = from_versioned(bytes)?;
    Ok(Beacon {
        account: wire.account,
        epoch: wire.epoch,
        seq: wire.seq,
        at: wire.at_us,
        open_trades: wire.open_trades,
        open_pendings: wire.open_pendings,
        digest: wire.digest,
        funds: wire.funds,
    })
}

/// Encodes a request for a snapshot.
pub fn encode_snapshot_request(account: AccountId, heard: Option<Epoch>) -> Vec<u8> {
    to_named(&SnapshotRequest { v: VERSION, account, heard })
}

/// Decodes a request for a snapshot.
pub fn decode_snapshot_request(bytes: &[u8]) -> Result<SnapshotRequest, DecodeError> {
    from_versioned(bytes)
}

/// Encodes a request to the owner of an account.
pub fn encode_control_request(request: &ControlRequest) -> Vec<u8> {
    to_named(request)
}

/// Decodes a request to the owner of an account.
pub fn decode_control_request(bytes: &[u8]) -> Result<ControlRequest, DecodeError> {
    from_versioned(bytes)
}

/// Encodes the answer of an owner.
pub fn encode_control_reply(reply: &ControlReply) -> Vec<u8> {
    to_named(reply)
}

/// Decodes the answer of an owner.
pub fn decode_control_reply(bytes: &[u8]) -> Result<ControlReply, DecodeError> {
    from_versioned(bytes)
}

/// Encodes a snapshot as its pages.
pub fn encode_snapshot(snapshot: &MasterSnapshot) -> Vec<Vec<u8>> {
    let digest = snapshot.book.digest();
    let rows = snapshot.book.positions.len() + snapshot.book.pendings.len();
    let pages = rows.div_ceil(SNAPSHOT_PAGE_ROWS).max(1);
    let mut positions = snapshot.book.positions.values();
    let mut pendings = snapshot.book.pendings.values();
    (0..pages)
        .map(|page| {
            let page_positions: Vec<_> =
                positions.by_ref().take(SNAPSHOT_PAGE_ROWS).cloned().collect();
            let room = SNAPSHOT_PAGE_ROWS - page_positions.len();
            to_named(&SnapshotPage {
                v: VERSION,
                account: snapshot.account,
                epoch: snapshot.epoch,
                seq: snapshot.seq,
                at_us: snapshot.at,
                page: page as u32,
                pages: pages as u32,
                complete: true,
                digest,
                positions: page_positions,
                pendings: pendings.by_ref().take(room).cloned().collect(),
                funds: snapshot.funds.clone(),
            })
        })
        .collect()
}

/// Decodes one page of a snapshot.
pub fn decode_snapshot_page(bytes: &[u8]) -> Result<SnapshotPage, DecodeError> {
    let page: SnapshotPage = from_versioned(bytes)?;
    let problem = if !page.complete {
        Some(("complete", "an incomplete read is not a snapshot".to_owned()))
    } else if page.pages == 0 || page.pages > SNAPSHOT_PAGES_MAX {
        Some(("pages", format!("must be 1 to {SNAPSHOT_PAGES_MAX}, got {}", page.pages)))
    } else if page.page >= page.pages {
        Some(("page", format!("must be below pages ({}), got {}", page.pages, page.page)))
    } else {
        None
    };
    match problem {
        Some((field, problem)) => Err(DecodeError::Field { field: field.into(), problem }),
        None => Ok(page),
    }
}

/// Puts the pages of one snapshot together; gives it out only when all of them agree and are there.
#[derive(Debug, Default)]
pub struct SnapshotPages {
    pages: Vec<Option<SnapshotPage>>,
}

impl SnapshotPages {
    /// Takes one page. The snapshot comes out with the last missing page; a page of another
    /// (epoch, seq) starts over, because a publisher that was asked twice answers twice.
    pub fn take(&mut self, page: SnapshotPage) -> Result<Option<MasterSnapshot>, DecodeError> {
        let same = self.pages.len() == page.pages as usize
            && self.pages.iter().flatten().all(|have| {
                (have.account, have.epoch, have.seq, have.digest)
                    == (page.account, page.epoch, page.seq, page.digest)
            });
        if !same {
            self.pages = vec![None; page.pages as usize];
        }
        let slot = page.page as usize;
        self.pages[slot] = Some(page);
        if self.pages.iter().any(Option::is_none) {
            return Ok(None);
        }
        let pages = std::mem::take(&mut self.pages);
        join_pages(pages.into_iter().flatten().collect()).map(Some)
    }
}

fn join_pages(pages: Vec<SnapshotPage>) -> Result<MasterSnapshot, DecodeError> {
    let first = pages.first().expect("a snapshot has at least one page");
    let mut snapshot = MasterSnapshot {
        account: first.account,
        epoch: first.epoch,
        seq: first.seq,
        at: first.at_us,
        book: Book::default(),
        funds: first.funds.clone(),
    };
    let digest = first.digest;
    for page in pages {
        for position in page.positions {
            snapshot.book.positions.insert(position.ticket, position);
        }
        for pending in page.pendings {
            snapshot.book.pendings.insert(pending.ticket, pending);
        }
    }
    if snapshot.book.digest() != digest {
        return Err(DecodeError::Field {
            field: "digest".into(),
            problem: format!("{} does not match the rows of the pages", digest.0),
        });
    }
    Ok(snapshot)
}

fn to_named<T: Serialize>(value: &T) -> Vec<u8> {
    rmp_serde::to_vec_named(value).expect("our own messages have no value that MessagePack lacks")
}

impl Versioned for WireEvent<'_> {
    const IS_EVENT: bool = true;

    fn version(&self) -> u8 {
        self.v
    }
}

impl Versioned for WireBeacon {
    fn version(&self) -> u8 {
        self.v
    }
}

impl Versioned for SnapshotRequest {
    fn version(&self) -> u8 {
        self.v
    }
}

impl Versioned for ControlRequest {
    fn version(&self) -> u8 {
        self.v
    }
}

impl Versioned for ControlReply {
    fn version(&self) -> u8 {
        self.v
    }
}

impl Versioned for SnapshotPage {
    fn version(&self) -> u8 {
        self.v
    }
}

/// One pass where all is well, as nearly always; what is wrong is looked for only where something is.
fn from_versioned<'a, T: Deserialize<'a> + Versioned>(bytes: &'a [u8]) -> Result<T, DecodeError> {
    if bytes.len() > MESSAGE_BYTES_MAX {
        return Err(DecodeError::TooLarge { bytes: bytes.len() });
    }
    // An array of the right values would do as well, and is not of the contract.
    let is_map = matches!(bytes.first(), Some(0x80..=0x8f | 0xde | 0xdf));
    let message = T::deserialize(&mut rmp_serde::Deserializer::from_read_ref(bytes));
    match message {
        Ok(message) if is_map && message.version() == VERSION => Ok(message),
        _ => explained(bytes),
    }
}

/// The same, slowly: a wrong version or kind is said before a wrong field, and a field by its path.
fn explained<'a, T: Deserialize<'a> + Versioned>(bytes: &'a [u8]) -> Result<T, DecodeError> {
    let header: Header<'a> = with_path(bytes)?;
    if header.v != u64::from(VERSION) {
        return Err(DecodeError::Version { version: header.v });
    }
    if T::IS_EVENT {
        known_kind(header.kind.ok_or(DecodeError::missing("kind", "a trade event"))?)?;
    }
    with_path(bytes)
}

fn with_path<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T, DecodeError> {
    let mut reader = rmp_serde::Deserializer::from_read_ref(bytes);
    serde_path_to_error::deserialize(&mut reader).map_err(|error| DecodeError::Field {
        field: error.path().to_string(),
        problem: error.inner().to_string().chars().take(300).collect(),
    })
}
