//! Each law is broken once, in evidence that is otherwise clean, and must be found.

mod notes;

use super::{Evidence, Law, Life, Report};
use crate::chaos::audit::{AuditFact, AuditRow, PairWrite, Tenure};
use crate::chaos::faults::Span;
use crate::chaos::tap::{BusRecord, Said};
use crate::chaos::timing;
use crate::chaos::world::{MasterLink, MasterSite};
use crate::oracle::Link;
use paper::ledger::{Cause, Fact, Ledger, LedgerRow, RequestFact, TradeEventKind, TradeFact};
use paper::protocol::{Instruction, OrderMeta, OrderReply};
use rust_decimal::Decimal;
use schemas::{
    AccountId, Epoch, FollowerTicket, LinkId, Lots, Magic, MasterTicket, Micros, NodeId, OrderDone,
    Seq, Side, Token,
};
use uuid::Uuid;

const SECOND: i64 = 1_000_000;
const START: i64 = 1_000 * SECOND;
const OLD: &str = "chaos-1-0000aaaa";
const NEW: &str = "chaos-2-0000bbbb";

fn account(id: u64) -> AccountId {
    AccountId::new(id).unwrap()
}

fn lots(text: &str) -> Lots {
    text.parse().unwrap()
}

/// Seconds after the start.
fn at(seconds: f64) -> Micros {
    Micros(START + (seconds * SECOND as f64) as i64)
}

/// One master, account 1, and one follower, account 2, with twice its volume; the master opens
/// ticket 7 with 0.10 lots at 0 s. The old node holds the follower under token 3.
struct Planted(Evidence, Vec<LedgerRow>);

impl Planted {
    fn new() -> Planted {
        let (link, follower) = (LinkId::new(1).unwrap(), account(2));
        let link = Link { link, follower, multiplier: Decimal::TWO };
        let mut evidence = Evidence {
            masters: vec![MasterSite { account: account(1), is_leased: false }],
            links: vec![MasterLink { master: account(1), link }],
            audits: vec![Vec::new()],
            ..Evidence::default()
        };
        let volumes = vec![(at(0.0), lots("0.10").get())];
        let life = Life { side: Side::Buy, opened_at: at(0.0), volumes, closed_at: None };
        evidence.lives.insert((account(1), 7), life);
        let mut planted = Planted(evidence, Vec::new());
        planted.lease(-1.0, (2, None), (3, Some(OLD)), None);
        for second in 0..30 {
            planted.lease(f64::from(second), (3, Some(OLD)), (3, Some(OLD)), None);
        }
        planted
    }

    /// The lease of the follower goes from one tenure to another, or on; it ends a lease later, or
    /// never was.
    fn lease(
        &mut self,
        seconds: f64,
        before: (i64, Option<&str>),
        after: (i64, Option<&str>),
        until_before: Option<f64>,
    ) {
        let tenure =
            |(token, node): (i64, Option<&str>)| Tenure { token, node: node.map(str::to_owned) };
        let until = after.1.map(|_| at(seconds).plus(timing::LEASE));
        self.commit(
            seconds,
            AuditFact::Lease {
                account: 2,
                before: tenure(before),
                after: tenure(after),
                until_before: until_before.map(at),
                until,
                owned: 1,
            },
        );
    }

    fn commit(&mut self, seconds: f64, fact: AuditFact) {
        let id = self.0.audits[0].len() as i64;
        self.0.audits[0].push(AuditRow { id, at: at(seconds), fact });
    }

    fn row(&mut self, seconds: f64, fact: Fact) {
        let row = self.1.len() as u64;
        let at_mono_us = (seconds * SECOND as f64) as u64;
        self.1.push(LedgerRow { row, at_mono_us, at_us: at(seconds), fact });
    }

    fn request(&mut self, seconds: f64, by: (&str, u64), instruction: Instruction) {
        let meta = OrderMeta {
            node: NodeId::new(by.0).unwrap(),
            token: Token::new(by.1).unwrap(),
            deadline_margin_us: SECOND,
            sent_at_us: at(seconds),
            client_ref: 0,
        };
        let ticket = FollowerTicket::new(1).unwrap();
        let done = OrderDone { ticket, lots: None, price: None, remainder: None };
        let reply = OrderReply::Done(done);
        let mono_us = (seconds * SECOND as f64) as u64;
        let request = RequestFact {
            connection: 1,
            account: account(2),
            meta: Some(meta),
            instruction,
            reply,
            request: 0,
            sent_mono_us: mono_us,
            arrived_mono_us: mono_us,
            arrival: self.1.len() as u64,
            answer_after_us: None,
            faults: Vec::new(),
        };
        self.row(seconds, Fact::Request(request));
    }

    /// An open by a node, of ticket 7 unless the comment says otherwise, and its trade.
    fn open(&mut self, seconds: f64, by: (&str, u64), ticket: u64, volume: &str) {
        let (side, lots) = (Side::Buy, lots(volume));
        self.request(seconds, by, open(7, side, lots));
        self.trade(seconds, TradeEventKind::Opened, ticket, volume);
    }

    fn trade(&mut self, seconds: f64, event: TradeEventKind, ticket: u64, volume: &str) {
        let ticket = FollowerTicket::new(ticket).unwrap();
        self.row(
            seconds,
            Fact::Trade(TradeFact {
                account: account(2),
                event,
                cause: Cause::Order,
                ticket,
                first_ticket: ticket,
                new_ticket: None,
                symbol: "EURUSD".parse().unwrap(),
                side: Side::Buy,
                lots: lots(volume),
                lots_left: None,
                price: None,
                stop_loss: None,
                take_profit: None,
                magic: 5,
                comment: tag(7),
            }),
        );
    }

    /// A close of a ticket by the old node; a part if there is a volume.
    fn close(&mut self, seconds: f64, ticket: u64, part: Option<&str>, closed: &str) {
        let number = FollowerTicket::new(ticket).unwrap();
        let close = Instruction::Close { ticket: number, lots: part.map(lots) };
        self.request(seconds, (OLD, 3), close);
        let event = if part.is_some() { TradeEventKind::Reduced } else { TradeEventKind::Closed };
        self.trade(seconds, event, ticket, closed);
    }

    fn life(&mut self) -> &mut Life {
        self.0.lives.get_mut(&(account(1), 7)).unwrap()
    }

    fn pair(&mut self, seconds: f64, state: &str, version: i64, tokens: (i64, i64), live: i64) {
        let tenure = |token| Tenure { token, node: Some(OLD.to_owned()) };
        self.commit(
            seconds,
            AuditFact::Pair(PairWrite {
                id: Uuid::from_u128(9),
                link: 1,
                follower: 2,
                master_ticket: 7,
                follower_ticket: Some(1),
                state: state.to_owned(),
                version,
                writer: tenure(tokens.0),
                now: tenure(tokens.1),
                live,
            }),
        );
    }

    fn said(&mut self, seconds: f64, epoch: u64, seq: u64, what: Said) {
        self.0.bus.push(BusRecord {
            heard_at: at(seconds),
            at: at(seconds),
            master: account(1),
            epoch: Epoch::new(epoch).unwrap(),
            seq: Seq::new(seq).unwrap(),
            what,
        });
    }

    fn freeze(&mut self, from: f64, until: f64) {
        self.0.spans.push(Span {
            kind: "freeze_long",
            node: Some("chaos-1".to_owned()),
            excuses_extra: true,
            from: at(from),
            until: at(until),
        });
    }

    fn check(mut self) -> Report {
        self.0.ledger = Ledger::from_rows(self.1);
        self.0.check()
    }

    /// Checks, and wants this law broken and no other.
    #[track_caller]
    fn breaks(self, law: Law) {
        let report = self.check();
        let laws: Vec<Law> = report.findings.iter().map(|finding| finding.law).collect();
        assert!(!laws.is_empty() && laws.iter().all(|found| *found == law), "{report:#?}");
    }
}

fn tag(ticket: u64) -> String {
    let link = LinkId::new(1).unwrap();
    reconcile::tag::encode(link, MasterTicket::new(ticket).unwrap()).unwrap().to_string()
}

fn open(ticket: u64, side: Side, lots: Lots) -> Instruction {
    Instruction::Open {
        symbol: "EURUSD".parse().unwrap(),
        side,
        lots,
        stop_loss: None,
        take_profit: None,
        magic: Magic::new(5).unwrap().as_i64(),
        comment: tag(ticket),
    }
}

#[test]
fn a_life_from_open_to_close_is_clean() {
    let mut planted = Planted::new();
    planted.open(0.1, (OLD, 3), 1, "0.20");
    planted.pair(0.2, "sending", 1, (3, 3), 1);
    planted.pair(0.3, "open", 2, (3, 3), 1);
    planted.life().volumes.push((at(2.0), lots("0.05").get()));
    planted.close(2.1, 1, Some("0.10"), "0.10");
    planted.life().closed_at = Some(at(4.0));
    planted.close(4.1, 1, None, "0.10");
    planted.pair(4.2, "closed", 3, (3, 3), 0);
    planted.said(0.0, 1, 1, Said::Event("position_opened".into(), 7));
    planted.said(5.0, 2, 0, Said::Beacon);
    let report = planted.check();
    assert!(report.findings.is_empty(), "{report:#?}");
    assert_eq!((report.orders, report.opens, report.duplicates), (3, 1, 0));
    assert_eq!(report.margin_min_us, Some(SECOND));
}

#[test]
fn an_order_under_an_older_token_breaks_s1() {
    let mut planted = Planted::new();
    planted.lease(8.0, (3, Some(OLD)), (4, Some(NEW)), Some(7.0));
    planted.open(8.5, (NEW, 4), 1, "0.20");
    planted.life().closed_at = Some(at(8.6));
    planted.close(8.7, 1, None, "0.20");
    planted.breaks(Law::S1);
}

#[test]
fn two_nodes_under_one_token_break_s1() {
    let mut planted = Planted::new();
    planted.lease(8.0, (3, Some(NEW)), (3, Some(NEW)), None);
    planted.open(8.1, (OLD, 3), 1, "0.20");
    planted.life().closed_at = Some(at(8.6));
    let close = Instruction::Close { ticket: FollowerTicket::new(1).unwrap(), lots: None };
    planted.request(8.7, (NEW, 3), close);
    planted.breaks(Law::S1);
}

/// The old node opens under token 3; a server is promoted that lacks its claim, and gives this token to
/// the new node, which closes.
fn token_given_again(token: i64) -> Planted {
    let mut planted = Planted::new();
    planted.open(0.1, (OLD, 3), 1, "0.20");
    planted.lease(20.0, (token - 1, None), (token, Some(NEW)), None);
    let claim = planted.0.audits[0].pop().unwrap();
    planted.0.audits.push(vec![claim]);
    planted.life().closed_at = Some(at(20.5));
    let close = Instruction::Close { ticket: FollowerTicket::new(1).unwrap(), lots: None };
    planted.request(20.6, (NEW, token as u64), close);
    planted.trade(20.6, TradeEventKind::Closed, 1, "0.20");
    planted
}

#[test]
fn a_token_that_a_promotion_took_back_may_be_given_again() {
    for token in [3, 2] {
        let report = token_given_again(token).check();
        assert!(report.findings.is_empty(), "{token}: {report:#?}");
    }
}

#[test]
fn a_node_whose_claim_was_taken_back_breaks_s1_after_the_next_owner() {
    // The number that the new primary gave, and the one before it: it lacked several claims.
    for token in [3, 2] {
        let mut planted = token_given_again(token);
        let close = Instruction::Close { ticket: FollowerTicket::new(1).unwrap(), lots: None };
        planted.request(20.7, (OLD, 3), close);
        planted.breaks(Law::S1);
    }
}

#[test]
fn a_token_that_the_database_never_gave_breaks_s1() {
    let mut planted = Planted::new();
    planted.open(0.1, (NEW, 9), 1, "0.20");
    planted.breaks(Law::S1);
}

#[test]
fn a_margin_below_zero_breaks_s2() {
    let mut planted = Planted::new();
    planted.open(0.1, (OLD, 3), 1, "0.20");
    let Fact::Request(RequestFact { meta: Some(meta), .. }) = &mut planted.1[0].fact else {
        unreachable!()
    };
    meta.deadline_margin_us = -1;
    planted.breaks(Law::S2);
}

#[test]
fn an_order_after_the_lease_less_the_fence_breaks_s2_whatever_it_states() {
    let mut planted = Planted::new();
    // The last renewal was at 29 s; half of the fence is for the way to the broker.
    let end = 29.0 + (timing::LEASE - timing::FENCE / 2).as_secs_f64();
    planted.open(end + 0.1, (OLD, 3), 1, "0.20");
    planted.breaks(Law::S2);
    let mut in_time = Planted::new();
    in_time.open(end - 0.1, (OLD, 3), 1, "0.20");
    assert!(in_time.check().findings.is_empty());
}

#[test]
fn a_claim_before_the_lease_has_ended_breaks_s3() {
    let mut planted = Planted::new();
    planted.lease(30.0, (3, Some(OLD)), (4, Some(NEW)), Some(35.0));
    planted.breaks(Law::S3);
}

#[test]
fn a_token_that_falls_breaks_s3() {
    let mut planted = Planted::new();
    planted.lease(36.0, (3, Some(OLD)), (2, Some(NEW)), Some(35.0));
    planted.breaks(Law::S3);
}

fn doubled(closed_at: Option<f64>) -> Planted {
    let mut planted = Planted::new();
    planted.lease(8.0, (3, Some(OLD)), (4, Some(NEW)), Some(7.0));
    planted.lease(9.0, (4, Some(NEW)), (4, Some(NEW)), None);
    planted.open(0.1, (OLD, 3), 1, "0.20");
    planted.open(9.1, (NEW, 4), 2, "0.20");
    if let Some(closed_at) = closed_at {
        for second in 10..(closed_at as u32 + 1) {
            planted.lease(f64::from(second), (4, Some(NEW)), (4, Some(NEW)), None);
        }
        let close = Instruction::Close { ticket: FollowerTicket::new(2).unwrap(), lots: None };
        planted.request(closed_at, (NEW, 4), close);
        planted.trade(closed_at, TradeEventKind::Closed, 2, "0.20");
    }
    planted
}

#[test]
fn a_second_copy_breaks_s4() {
    doubled(None).breaks(Law::S4);
    doubled(Some(10.0)).breaks(Law::S4);
}

#[test]
fn an_extra_copy_of_a_frozen_node_is_excused_only_if_it_is_closed_in_time() {
    let mut excused = doubled(Some(10.0));
    excused.freeze(1.0, 9.0);
    let report = excused.check();
    assert!(report.findings.is_empty(), "{report:#?}");
    assert_eq!((report.duplicates, report.excused_extras), (1, 1));
    for closed_at in [None, Some(9.1 + 22.5)] {
        let mut late = doubled(closed_at);
        late.freeze(1.0, 9.0);
        late.breaks(Law::S4);
    }
    let mut long_ago = doubled(Some(10.0));
    long_ago.freeze(1.0, 6.0);
    long_ago.breaks(Law::S4);
}

#[test]
fn an_open_after_the_copy_has_ended_breaks_s5() {
    let mut planted = Planted::new();
    planted.open(0.1, (OLD, 3), 1, "0.20");
    // Somebody closes it by hand.
    planted.trade(1.0, TradeEventKind::Closed, 1, "0.20");
    planted.request(2.0, (OLD, 3), open(7, Side::Buy, lots("0.20")));
    planted.breaks(Law::S5);
}

#[test]
fn an_open_without_a_cause_breaks_s6() {
    for order in [
        open(8, Side::Buy, lots("0.20")),
        open(7, Side::Sell, lots("0.20")),
        open(7, Side::Buy, lots("0.21")),
    ] {
        let mut planted = Planted::new();
        planted.request(0.1, (OLD, 3), order);
        planted.breaks(Law::S6);
    }
    let mut before_it_opened = Planted::new();
    before_it_opened.request(-0.1, (OLD, 3), open(7, Side::Buy, lots("0.20")));
    before_it_opened.breaks(Law::S6);
}

#[test]
fn an_open_long_after_the_masters_close_breaks_s6() {
    let late = super::broker::STALE_OPEN_MAX.as_secs_f64();
    for (after, is_broken) in [(late - 0.1, false), (late + 0.1, true)] {
        let mut planted = Planted::new();
        planted.life().closed_at = Some(at(1.0));
        planted.request(1.0 + after, (OLD, 3), open(7, Side::Buy, lots("0.20")));
        assert_eq!(!planted.check().findings.is_empty(), is_broken);
    }
}

#[test]
fn a_close_without_a_cause_breaks_s7() {
    let mut whole = Planted::new();
    whole.open(0.1, (OLD, 3), 1, "0.20");
    whole.life().volumes.push((at(0.5), lots("0.05").get()));
    whole.life().closed_at = Some(at(2.0));
    whole.close(1.9, 1, None, "0.20");
    whole.breaks(Law::S7);
    let mut part = Planted::new();
    part.open(0.1, (OLD, 3), 1, "0.20");
    part.life().volumes.push((at(2.0), lots("0.05").get()));
    let close =
        Instruction::Close { ticket: FollowerTicket::new(1).unwrap(), lots: Some(lots("0.1")) };
    part.request(1.9, (OLD, 3), close);
    part.breaks(Law::S7);
}

#[test]
fn a_stranger_may_be_closed_only_if_it_came_later_than_the_longest_answer() {
    let longest = timing::longest_answer().as_secs_f64();
    for (seconds, is_broken) in [(longest - 0.1, true), (longest + 0.1, false)] {
        let mut planted = Planted::new();
        planted.open(seconds + 0.1, (OLD, 3), 1, "0.20");
        let Fact::Request(request) = &mut planted.1[0].fact else { unreachable!() };
        request.sent_mono_us = 100_000;
        planted.close(12.0, 1, None, "0.20");
        let laws: Vec<Law> = planted.check().findings.iter().map(|f| f.law).collect();
        assert_eq!(laws, if is_broken { vec![Law::S7] } else { vec![] }, "after {seconds} s");
    }
}

#[test]
fn a_rest_that_is_no_volume_of_the_master_breaks_s8() {
    let mut planted = Planted::new();
    planted.open(0.1, (OLD, 3), 1, "0.20");
    planted.life().volumes.push((at(1.0), lots("0.05").get()));
    planted.close(1.1, 1, Some("0.15"), "0.15");
    planted.breaks(Law::S8);
}

#[test]
fn a_live_row_of_a_former_tenure_breaks_s9() {
    let mut planted = Planted::new();
    planted.pair(1.0, "open", 1, (2, 3), 1);
    planted.breaks(Law::S9);
    let mut ended = Planted::new();
    ended.pair(1.0, "closed", 1, (2, 3), 0);
    assert!(ended.check().findings.is_empty(), "an end is accepted from anybody");
    let mut status = Planted::new();
    let tenure = |token| Tenure { token, node: Some(OLD.to_owned()) };
    let (writer, now, session) = (tenure(2), tenure(3), "copying".to_owned());
    status.commit(1.0, AuditFact::Status { account: 2, writer, now, session });
    status.breaks(Law::S9);
}

#[test]
fn a_pair_that_goes_back_or_is_doubled_breaks_s10() {
    for [first, second] in [["open", "sending"], ["closed", "open"], ["closed", "failed"]] {
        let mut planted = Planted::new();
        planted.pair(1.0, first, 1, (3, 3), 1);
        planted.pair(2.0, second, 2, (3, 3), 1);
        planted.breaks(Law::S10);
    }
    let mut older = Planted::new();
    older.pair(1.0, "open", 2, (3, 3), 1);
    older.pair(2.0, "open", 1, (3, 3), 1);
    older.breaks(Law::S10);
    let mut doubled = Planted::new();
    doubled.pair(1.0, "open", 1, (3, 3), 2);
    doubled.breaks(Law::S10);
}

#[test]
fn two_events_at_one_place_break_s11() {
    let mut planted = Planted::new();
    planted.said(1.0, 1, 4, Said::Event("position_opened".into(), 7));
    planted.said(1.0, 1, 4, Said::Event("position_opened".into(), 8));
    planted.breaks(Law::S11);
}

#[test]
fn an_old_epoch_that_speaks_after_a_new_one_breaks_s11() {
    let mut planted = Planted::new();
    planted.said(1.0, 1, 4, Said::Beacon);
    planted.said(2.0, 2, 0, Said::Beacon);
    planted.said(2.5, 1, 5, Said::Event("position_closed".into(), 7));
    planted.breaks(Law::S11);
    let mut late = Planted::new();
    late.said(2.0, 2, 0, Said::Beacon);
    late.said(1.9, 1, 5, Said::Event("position_closed".into(), 7));
    assert!(late.check().findings.is_empty(), "heard late is not said late");
}

#[test]
fn a_node_with_more_than_its_capacity_breaks_s16() {
    let mut planted = Planted::new();
    let AuditFact::Lease { owned, .. } = &mut planted.0.audits[0][3].fact else { unreachable!() };
    *owned = i64::from(timing::CAPACITY) + 1;
    planted.breaks(Law::S16);
}

#[test]
fn an_order_after_the_release_breaks_s20() {
    let mut planted = Planted::new();
    planted.lease(30.0, (3, Some(OLD)), (3, None), None);
    planted.open(30.1, (OLD, 3), 1, "0.20");
    planted.breaks(Law::S20);
}

#[test]
fn a_takeover_that_takes_too_long_breaks_l1() {
    let status = |token: i64| {
        let tenure = Tenure { token, node: Some(NEW.to_owned()) };
        let session = "copying".to_owned();
        AuditFact::Status { account: 2, writer: tenure.clone(), now: tenure, session }
    };
    let takeover = |seconds: f64| {
        let mut planted = Planted::new();
        // The last renewal was at 29 s.
        let end = 29.0 + timing::LEASE.as_secs_f64();
        planted.lease(end + 0.5, (3, Some(OLD)), (4, Some(NEW)), Some(end));
        planted.commit(29.0 + seconds, status(4));
        planted
    };
    let max = timing::TAKEOVER_MAX.as_secs_f64();
    takeover(max + 0.1).breaks(Law::L1);
    let in_time = takeover(max - 0.1).check();
    assert!(in_time.findings.is_empty());
    assert_eq!(in_time.takeovers.len(), 1);
}

#[test]
fn snapshots_that_follow_too_soon_break_l6() {
    let mut planted = Planted::new();
    planted.said(1.0, 1, 4, Said::Snapshot);
    planted.said(1.3, 1, 4, Said::Snapshot);
    assert!(planted.0.check().findings.is_empty());
    planted.said(1.4, 1, 4, Said::Snapshot);
    planted.breaks(Law::L6);
}

#[test]
fn a_story_tells_both_sides_in_the_order_of_time() {
    let planted = doubled(None);
    let mut evidence = planted.0.clone();
    evidence.ledger = Ledger::from_rows(planted.1);
    let report = evidence.check();
    let story = evidence.story(&report.findings[0]);
    let places: Vec<usize> = ["master: 7 opened", "broker: ", "lease: chaos-2-0000bbbb"]
        .iter()
        .map(|part| story.iter().position(|line| line.contains(part)).unwrap())
        .collect();
    assert!(places.is_sorted(), "{story:#?}");
}
