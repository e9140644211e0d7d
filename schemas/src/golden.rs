//! One encoded file for every message and version, under `schemas/golden/`.
//!
//! A file that no longer matches means that the wire contract changed. If that was
//! meant, write the files anew with `LOCKSTEP_BLESS=1 cargo test -p lockstep-schemas`
//! and say in the commit why old publishers still work.

use crate::codec::{self, EVENT_KINDS};
use crate::control::{
    ControlReply, ControlRequest, ControlVerb, LinkPlan, PlannedStep, PlannedWait,
};
use crate::{
    AccountId, Beacon, Book, Change, CloseReason, Epoch, Funds, MasterPending, MasterPosition,
    MasterSnapshot, MasterTicket, Micros, PendingKind, Seq, Side, Symbol, TradeEvent,
};
use std::path::PathBuf;

/// Instant used in every golden message: 2026-01-02 03:04:05.678901 UTC.
const AT: Micros = Micros(1_767_323_045_678_901);

pub(crate) fn account() -> AccountId {
    AccountId::new(7).unwrap()
}

pub(crate) fn position() -> MasterPosition {
    MasterPosition {
        ticket: MasterTicket::new(10_884_298).unwrap(),
        symbol: Symbol::new("EURUSD.").unwrap(),
        side: Side::Buy,
        lots: "0.3".parse().unwrap(),
        lots_at_open: "0.5".parse().unwrap(),
        open_price: Some("1.08251".parse().unwrap()),
        stop_loss: Some("1.0795".parse().unwrap()),
        take_profit: None,
        opened_at: Micros(1_767_322_800_000_000),
        contract_size: Some(100_000.into()),
        is_copy: false,
    }
}

pub(crate) fn pending() -> MasterPending {
    MasterPending {
        ticket: MasterTicket::new(10_884_301).unwrap(),
        symbol: Symbol::new("XAUUSD").unwrap(),
        kind: PendingKind::SellLimit,
        lots: "0.02".parse().unwrap(),
        price: "4694.88".parse().unwrap(),
        stop_loss: None,
        take_profit: Some("4510.2".parse().unwrap()),
        placed_at: Micros(1_767_322_900_000_000),
        contract_size: None,
        is_copy: false,
    }
}

fn funds() -> Funds {
    Funds {
        balance: "10000".parse().unwrap(),
        equity: "9987.55".parse().unwrap(),
        margin_used: None,
        currency: Symbol::new("USD").unwrap(),
        at: AT,
    }
}

pub(crate) fn book() -> Book {
    let mut book = Book::default();
    book.positions.insert(position().ticket, position());
    book.pendings.insert(pending().ticket, pending());
    book
}

pub(crate) fn snapshot() -> MasterSnapshot {
    MasterSnapshot {
        account: account(),
        epoch: Epoch::new(1_767_323_000_000_000).unwrap(),
        seq: Seq::new(8).unwrap(),
        at: AT,
        book: book(),
        funds: Some(funds()),
    }
}

pub(crate) fn beacon() -> Beacon {
    Beacon {
        account: account(),
        epoch: snapshot().epoch,
        seq: Seq::new(8).unwrap(),
        at: AT,
        open_trades: 1,
        open_pendings: 1,
        digest: book().digest(),
        funds: Some(funds()),
    }
}

pub(crate) fn events() -> Vec<TradeEvent> {
    let filled = MasterPosition { ticket: pending().ticket, ..position() };
    let changes = [
        Change::PositionOpened(position()),
        Change::PositionModified(position()),
        Change::VolumeChanged { position: position(), previous_lots: "0.5".parse().unwrap() },
        Change::PositionClosed {
            position: position(),
            price: Some("1.0795".parse().unwrap()),
            reason: CloseReason::StopLoss,
        },
        Change::PendingPlaced(pending()),
        Change::PendingModified(pending()),
        Change::PendingCancelled(pending()),
        Change::PendingFilled(filled),
    ];
    (1..)
        .zip(changes)
        .map(|(seq, change)| TradeEvent {
            account: account(),
            epoch: snapshot().epoch,
            seq: Seq::new(seq).unwrap(),
            at: AT,
            change,
        })
        .collect()
}

fn control_request() -> ControlRequest {
    ControlRequest {
        v: codec::VERSION,
        account: account(),
        verb: ControlVerb::Reconcile,
        link: Some(crate::LinkId::new(3).unwrap()),
    }
}

fn control_reply() -> ControlReply {
    let step = PlannedStep {
        ticket: position().ticket,
        step: "open_copy".into(),
        copy: None,
        symbol: Some(position().symbol),
        side: Some(Side::Buy),
        lots: Some(position().lots),
        reason: None,
    };
    let close = PlannedStep {
        ticket: pending().ticket,
        step: "close_copy".into(),
        copy: Some(crate::FollowerTicket::new(77).unwrap()),
        symbol: None,
        side: None,
        lots: None,
        reason: Some("master_closed".into()),
    };
    let plan = LinkPlan {
        link: crate::LinkId::new(3).unwrap(),
        unknown: None,
        epoch: Some(snapshot().epoch),
        seq: Some(snapshot().seq),
        at_us: AT,
        held: false,
        steps: vec![step, close],
        left_out: 0,
        waiting: vec![PlannedWait { ticket: pending().ticket, why: "answer_due".into() }],
    };
    let node = crate::NodeId::new("paper-host-1a2b3c4d").unwrap();
    ControlReply { v: codec::VERSION, account: account(), node, refused: None, plans: vec![plan] }
}

fn control_refusal() -> ControlReply {
    let refused = Some("its session at the broker is not open".to_owned());
    ControlReply { refused, plans: Vec::new(), ..control_reply() }
}

fn messages() -> Vec<(String, Vec<u8>)> {
    let mut messages: Vec<(String, Vec<u8>)> = events()
        .iter()
        .map(|event| (format!("v1.event.{}", event.change.kind()), codec::encode_event(event)))
        .collect();
    messages.push(("v1.beacon".into(), codec::encode_beacon(&beacon())));
    messages.push(("v1.snapshot_request".into(), codec::encode_snapshot_request(account(), None)));
    let above = codec::encode_snapshot_request(account(), Some(snapshot().epoch));
    messages.push(("v1.snapshot_request_heard".into(), above));
    let request = codec::encode_control_request(&control_request());
    messages.push(("v1.control_request".into(), request));
    messages.push(("v1.control_reply".into(), codec::encode_control_reply(&control_reply())));
    let refusal = codec::encode_control_reply(&control_refusal());
    messages.push(("v1.control_reply_refused".into(), refusal));
    messages.push(("v1.snapshot_page".into(), codec::encode_snapshot(&snapshot()).remove(0)));
    messages
}

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("golden")
}

/// The same map as text, for people who read the contract without a MessagePack tool.
fn as_json(bytes: &[u8]) -> String {
    let value: serde_json::Value = rmp_serde::from_slice(bytes).unwrap();
    format!("{}\n", serde_json::to_string_pretty(&value).unwrap())
}

#[test]
fn every_message_is_encoded_as_its_golden_file_says() {
    let bless = std::env::var_os("LOCKSTEP_BLESS").is_some();
    for (name, bytes) in messages() {
        let binary = folder().join(format!("{name}.msgpack"));
        let text = folder().join(format!("{name}.json"));
        if bless {
            std::fs::create_dir_all(folder()).unwrap();
            std::fs::write(&binary, &bytes).unwrap();
            std::fs::write(&text, as_json(&bytes)).unwrap();
        }
        let golden = std::fs::read(&binary).unwrap_or_else(|e| panic!("{}: {e}", binary.display()));
        assert_eq!(golden, bytes, "{name}: the encoding changed; see the head of golden.rs");
        assert_eq!(std::fs::read_to_string(&text).unwrap(), as_json(&bytes), "{name}.json");
    }
}

#[test]
fn every_golden_file_decodes_to_the_message_it_was_made_from() {
    let read = |name: &str| std::fs::read(folder().join(format!("{name}.msgpack"))).unwrap();
    for event in events() {
        let name = format!("v1.event.{}", event.change.kind());
        assert_eq!(codec::decode_event(&read(&name)).unwrap(), event);
    }
    assert_eq!(codec::decode_beacon(&read("v1.beacon")).unwrap(), beacon());
    let request = codec::decode_snapshot_request(&read("v1.snapshot_request")).unwrap();
    assert_eq!((request.account, request.heard), (account(), None));
    let request = codec::decode_snapshot_request(&read("v1.snapshot_request_heard")).unwrap();
    assert_eq!((request.account, request.heard), (account(), Some(snapshot().epoch)));
    let request = codec::decode_control_request(&read("v1.control_request")).unwrap();
    assert_eq!(request, control_request());
    let reply = codec::decode_control_reply(&read("v1.control_reply")).unwrap();
    assert_eq!(reply, control_reply());
    let reply = codec::decode_control_reply(&read("v1.control_reply_refused")).unwrap();
    assert_eq!(reply, control_refusal());
    let page = codec::decode_snapshot_page(&read("v1.snapshot_page")).unwrap();
    let joined = codec::SnapshotPages::default().take(page).unwrap();
    assert_eq!(joined, Some(snapshot()));
}

#[test]
fn every_file_in_the_golden_folder_belongs_to_a_message() {
    let known: Vec<String> = messages()
        .into_iter()
        .flat_map(|(name, _)| [format!("{name}.msgpack"), format!("{name}.json")])
        .collect();
    for entry in std::fs::read_dir(folder()).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(known.contains(&name), "{name} belongs to no message");
    }
    assert_eq!(events().len(), EVENT_KINDS.len());
}
