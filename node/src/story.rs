//! The story of one trade of a master on one link, from its rows.
//!
//! In: the rows of `pairs` and `copy_events` of (link, master ticket). Out: a verdict in one sentence
//! and what happened, in its order. [`verdict`] and [`says`] are pure.
//!
//! Not covered: what no row tells. A node that dies loses the events of its last moments; the next
//! owner's first event says how it found things.

use crate::writer::EventOutcome;
use reconcile::{CloseCause, EndedHow, FailReason, FoundBy, SkipReason};
use schemas::{LinkId, MasterTicket, RejectClass};
use serde::Serialize;
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row};
use utoipa::ToSchema;

/// Events that are read at most; a trade has some ten.
const EVENTS_MAX: i64 = 1_000;

/// Everything there is to say of it.
#[derive(Debug, Serialize, ToSchema)]
pub struct Story {
    /// Number of the link.
    pub link: i64,
    /// Name of the master.
    pub master: String,
    /// Name of the follower.
    pub follower: String,
    /// The master's ticket.
    pub master_ticket: i64,
    /// How it stands, as a word.
    pub verdict: &'static str,
    /// The same in a sentence.
    pub says: String,
    /// Its pairs, oldest first: more than one where a copy ended and another was found.
    pub pairs: Vec<PairTold>,
    /// What happened, oldest first.
    pub events: Vec<EventTold>,
}

/// A pair's row.
#[derive(Debug, Clone, Default, Serialize, ToSchema)]
pub struct PairTold {
    /// `sending`, `open`, `closing`, `closed`, `failed` or `skipped`.
    pub state: String,
    /// The copy's ticket.
    pub follower_ticket: Option<i64>,
    /// Why it ended.
    pub reason: Option<String>,
}

/// An event's row, and what it means.
#[derive(Debug, Clone, Default, Serialize, ToSchema)]
pub struct EventTold {
    /// When, by the node's clock.
    #[schema(format = DateTime)]
    pub at: String,
    /// The node that did it.
    pub node: String,
    /// Its lease token.
    pub lease_token: i64,
    /// The step.
    pub action: String,
    /// How it went.
    pub outcome: String,
    /// Why, as a word or in the broker's words.
    pub reason: Option<String>,
    /// The same in a sentence.
    pub says: String,
    /// The copy's ticket.
    pub follower_ticket: Option<i64>,
    /// Volume.
    pub lots: Option<String>,
    /// Price.
    pub price: Option<String>,
    /// From the master's callback to the order call, where an event led to it directly.
    pub own_time_us: Option<i64>,
    /// From the order call to the broker's answer.
    pub broker_time_us: Option<i64>,
}

/// Reads the story; nothing if there is no such link.
pub async fn read(
    db: &mut PgConnection,
    link: LinkId,
    ticket: MasterTicket,
) -> Result<Option<Story>, sqlx::Error> {
    let of_link = sqlx::query(
        "select m.name as master, f.name as follower from copy_links l
         join trading_accounts m on m.id = l.master_id
         join trading_accounts f on f.id = l.follower_id where l.id = $1",
    )
    .bind(link.as_i64())
    .fetch_optional(&mut *db)
    .await?;
    let Some(of_link) = of_link else { return Ok(None) };
    let pairs: Vec<PairTold> = sqlx::query(
        "select state, follower_ticket, reason from pairs
         where link_id = $1 and master_ticket = $2
             and follower_id = (select follower_id from copy_links where id = $1)
         order by coalesce(sent_at, opened_at, written_at), written_at",
    )
    .bind(link.as_i64())
    .bind(ticket.as_i64())
    .fetch_all(&mut *db)
    .await?
    .iter()
    .map(|row| PairTold {
        state: row.get("state"),
        follower_ticket: row.get("follower_ticket"),
        reason: row.get("reason"),
    })
    .collect();
    let query = format!(
        "select {EVENT_COLUMNS} from copy_events e where e.link_id = $1 and e.master_ticket = $2
         order by e.at, e.written_at limit $3"
    );
    let events: Vec<EventTold> = sqlx::query(sqlx::AssertSqlSafe(query))
        .bind(link.as_i64())
        .bind(ticket.as_i64())
        .bind(EVENTS_MAX)
        .fetch_all(&mut *db)
        .await?
        .iter()
        .map(event_told)
        .collect();
    let verdict = verdict(&pairs, &events);
    Ok(Some(Story {
        link: link.as_i64(),
        master: of_link.get("master"),
        follower: of_link.get("follower"),
        master_ticket: ticket.as_i64(),
        verdict: verdict.word,
        says: verdict.says,
        pairs,
        events,
    }))
}

/// What [`event_told`] reads of a row `e` of `copy_events`.
pub(crate) const EVENT_COLUMNS: &str =
    "to_char(e.at at time zone 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.MS\"Z\"') as at, e.node_id,
     e.lease_token, e.action, e.outcome, e.reason, e.follower_ticket, e.lots::text as lots, e.price::text as price,
     e.own_time_us, e.broker_time_us";

/// An event of a row that has [`EVENT_COLUMNS`].
pub(crate) fn event_told(row: &PgRow) -> EventTold {
    let event = EventTold {
        at: row.get("at"),
        node: row.get("node_id"),
        lease_token: row.get("lease_token"),
        action: row.get("action"),
        outcome: row.get("outcome"),
        reason: row.get("reason"),
        says: String::new(),
        follower_ticket: row.get("follower_ticket"),
        lots: row.get("lots"),
        price: row.get("price"),
        own_time_us: row.get("own_time_us"),
        broker_time_us: row.get("broker_time_us"),
    };
    let told = says(&event.action, &event.outcome, event.reason.as_deref());
    EventTold { says: told, ..event }
}

/// Why there may be no row of a trade.
pub(crate) const UNRECORDED_BECAUSE: &str = "the link is newer than the trade, or it is off or paused, by itself, by an account or by the kill \
     switch, or its master was not heard, or its follower has no owner or only just got one (see \
     `lockstep status`)";

/// How a trade stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verdict {
    /// As a word.
    pub word: &'static str,
    /// In a sentence.
    pub says: String,
}

impl Verdict {
    /// The word where no row tells of the trade.
    pub const UNKNOWN: &'static str = "unknown";

    fn new(word: &'static str, says: impl Into<String>) -> Self {
        Verdict { word, says: says.into() }
    }
}

/// What the rows come to. The last pair says how it stands, the events how it came to that.
pub fn verdict(pairs: &[PairTold], events: &[EventTold]) -> Verdict {
    let has = |action: &str| events.iter().any(|e| e.action == action && e.outcome == "done");
    let Some(pair) = pairs.last() else {
        return match events.last() {
            Some(last) => Verdict::new("tried", format!("not copied so far; last: {}", last.says)),
            None => Verdict::new(
                Verdict::UNKNOWN,
                format!("no node has recorded anything of it: {UNRECORDED_BECAUSE}"),
            ),
        };
    };
    let reason = pair.reason.as_deref().unwrap_or_default();
    match pair.state.as_str() {
        "skipped" => Verdict::new("skipped", format!("not copied: {}", why_not(reason))),
        "failed" => Verdict::new("failed", format!("not copied: {}", why_not(reason))),
        "sending" => Verdict::new(
            "sending",
            "an order is on its way, or the broker has not answered; a read of the account will tell",
        ),
        "closing" => Verdict::new("closing", "its close is on its way, or not answered yet"),
        state => {
            let (word, how) = how_copied(events);
            let duplicate =
                if has("close_duplicate") { "; a second copy was found and closed" } else { "" };
            if state == "closed" {
                Verdict::new(
                    "closed",
                    format!("{how}, and ended: {}{duplicate}", why_ended(reason)),
                )
            } else {
                Verdict::new(word, format!("{how}; the copy is open{duplicate}"))
            }
        }
    }
}

/// How a copy came to be, as a word and in words.
fn how_copied(events: &[EventTold]) -> (&'static str, &'static str) {
    let opened = events.iter().find(|event| {
        matches!(event.action.as_str(), "open_copy" | "place_pending") && event.outcome == "done"
    });
    let was_dropped = events.iter().any(|event| {
        event.outcome == EventOutcome::NotSent.as_str() && event.action != "close_copy"
    });
    match opened {
        Some(_) if was_dropped => {
            ("repaired", "copied by a later comparison, after an order was held back by the gate")
        }
        Some(event) if event.own_time_us.is_none() => (
            "copied_late",
            "copied late, by a comparison of the accounts or when an earlier answer came",
        ),
        Some(_) => ("copied", "copied as soon as the master's event came"),
        None if events.iter().any(|event| event.action == "adopt_copy") => {
            ("adopted", "copied by an earlier owner, and recognised by the next one")
        }
        None => ("copied", "copied; the event of its opening is not there any more"),
    }
}

fn why_not(reason: &str) -> &'static str {
    if let Some(reason) = SkipReason::from_word(reason) {
        return skipped_because(reason);
    }
    match FailReason::from_word(reason) {
        Some(FailReason::NeverArrived) => {
            "the broker neither answered nor shows it, long after an order can arrive"
        }
        Some(FailReason::RejectedRequote) => "the price moved away again and again (requote)",
        Some(FailReason::RejectedLater) => "the broker put it off until it was too late",
        Some(FailReason::RejectedInvalid) => {
            "the broker calls the order wrong (volume, price or stops)"
        }
        Some(FailReason::RejectedNoMoney) => "the account has not enough money",
        Some(FailReason::RejectedAlreadySo) => "the broker says that it was done already",
        Some(FailReason::RejectedDisabled) => "trading is disabled for the account or the symbol",
        Some(FailReason::RejectedStaleToken) => "the broker had seen a newer owner",
        None => "for a reason that this version does not know",
    }
}

fn skipped_because(reason: SkipReason) -> &'static str {
    match reason {
        SkipReason::BeforeCopyFrom => "the master opened it before the link began to copy",
        SkipReason::IsACopy => "it is a copy itself",
        SkipReason::CloseOnly => "the link only closes",
        SkipReason::SymbolUnmapped => {
            "the follower's broker has no such symbol: map it on the link"
        }
        SkipReason::BadSymbolSpec => "the broker describes the symbol in a way that makes no sense",
        SkipReason::LateOpenPriceMoved => {
            "it would have been late, and the price has left the link's slippage"
        }
        SkipReason::UnknownOpenPrice => {
            "it would have been late, and nobody knows at which price the master opened"
        }
        SkipReason::NoQuote => "it would have been late, and the follower's broker quotes no price",
        SkipReason::StaleQuote => {
            "it would have been late, and the follower's last price is older than 3 s"
        }
        SkipReason::BelowMin => "the volume is under the broker's smallest",
        SkipReason::AboveMax => "the volume is over the broker's largest",
        SkipReason::UnknownFunds => "its size is a ratio of funds that one side does not say",
        SkipReason::NoFunds => "its size is a ratio of funds, and one side has none",
        SkipReason::StaleEquity => "its size is a ratio of funds that are older than 30 s",
        SkipReason::CurrencyDiffers => "its size is a ratio of funds in different currencies",
        SkipReason::UnknownContractSize => {
            "sizes are aligned, and one side does not say its contract size"
        }
        SkipReason::NumberTooLarge => "the volume is too large to compute with",
        SkipReason::EndedBeforeTakeover => {
            "its copy was there and ended before this owner took over"
        }
        SkipReason::Untaggable => {
            "it would have been late, and the broker keeps no tags, so that nobody can tell whether a \
             copy is there"
        }
    }
}

fn why_ended(reason: &str) -> &'static str {
    if let Some(cause) = CloseCause::from_word(reason) {
        return closed_because(cause);
    }
    match EndedHow::from_word(reason) {
        Some(EndedHow::History) => "by its stops, by hand or by the broker, as the history shows",
        Some(EndedHow::Absent) => "it was not in a complete list of the account any more",
        Some(EndedHow::Reported) => "by its stops, by hand or by the broker, as the broker told",
        None => "for a reason that this version does not know",
    }
}

fn closed_because(cause: CloseCause) -> &'static str {
    match cause {
        CloseCause::MasterClosed => "the master closed",
        CloseCause::MasterReversed => "the master's ticket is in the other direction now",
        CloseCause::ClosingResumed => "a close that an earlier owner began was finished",
        CloseCause::LinkClosesOnly => "the link only closes",
        CloseCause::Duplicate => "it was a second copy of the same trade",
        CloseCause::OrphanMasterGone => {
            "it was a copy without a row, of a trade that the master has no more"
        }
        CloseCause::OrphanPairEnded => "it was a copy whose trade had ended already",
        CloseCause::UserRequest => "somebody asked for it",
    }
}

/// What one event means.
pub fn says(action: &str, outcome: &str, reason: Option<&str>) -> String {
    let reason = reason.unwrap_or_default();
    match outcome {
        "skipped" => format!("not copied: {}", why_not(reason)),
        "not_sent" => match reason {
            "gate" => "held back: the node's permission was over, or not sure enough".to_owned(),
            "session" => "not sent: there was no connection to the broker".to_owned(),
            other => format!("not sent: {other}"),
        },
        "unknown" => format!("nobody knows whether it was carried out: {reason}"),
        "rejected" => match reason.split_once(':') {
            Some((class, text)) if is_reject_class(class) => {
                format!("the broker refused ({}):{text}", class.replace('_', " "))
            }
            _ => format!("the broker refused: {reason}"),
        },
        _ => done(action, reason),
    }
}

fn is_reject_class(word: &str) -> bool {
    let all = [
        RejectClass::Requote,
        RejectClass::Later,
        RejectClass::Invalid,
        RejectClass::NoMoney,
        RejectClass::AlreadySo,
        RejectClass::Disabled,
        RejectClass::StaleToken,
    ];
    all.iter().any(|class| class.as_str() == word)
}

fn done(action: &str, reason: &str) -> String {
    let found = |by: &str| match FoundBy::from_word(by) {
        Some(FoundBy::Ticket) => "its row names its ticket",
        Some(FoundBy::Tag) => "it has our tag",
        Some(FoundBy::Lineage) => "the broker gave it a new number and says so",
        Some(FoundBy::Shape) => {
            "the broker gave it a new number; it fits one part that ended exactly"
        }
        Some(FoundBy::UniqueMatch) => "it fits exactly one trade of the master",
        Some(FoundBy::Fill) => "a waiting order became it",
        None => "it is ours",
    };
    match action {
        "open_copy" => "opened".to_owned(),
        "place_pending" => "waiting order placed".to_owned(),
        "modify_copy" | "modify_pending" => "stops or price changed".to_owned(),
        "reduce_copy" => "closed in part".to_owned(),
        "adopt_copy" => format!("found at the broker: {}", found(reason)),
        "rebind_copy" => format!("found again at the broker: {}", found(reason)),
        "mark_closed" => format!("has ended: {}", why_ended(reason)),
        "mark_failed" => format!("given up: {}", why_not(reason)),
        "close_duplicate" => format!("closed: {}", closed_because(CloseCause::Duplicate)),
        "close_copy" | "close_orphan" => format!("closed: {}", why_ended(reason)),
        "cancel_pending" => format!("waiting order cancelled: {}", why_ended(reason)),
        other => other.replace('_', " "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(action: &str, outcome: &str, reason: Option<&str>) -> EventTold {
        let event = EventTold {
            action: action.to_owned(),
            outcome: outcome.to_owned(),
            reason: reason.map(str::to_owned),
            ..EventTold::default()
        };
        let told = says(action, outcome, reason);
        EventTold { says: told, ..event }
    }

    fn direct(action: &str) -> EventTold {
        EventTold { own_time_us: Some(900), ..event(action, "done", None) }
    }

    fn pair(state: &str, reason: Option<&str>) -> PairTold {
        PairTold {
            state: state.to_owned(),
            follower_ticket: None,
            reason: reason.map(str::to_owned),
        }
    }

    fn told(pairs: &[PairTold], events: &[EventTold]) -> (&'static str, String) {
        let verdict = verdict(pairs, events);
        (verdict.word, verdict.says)
    }

    #[test]
    fn a_copy_that_an_event_led_to_is_told_from_one_that_came_late() {
        let open = pair("open", None);
        let (word, says) = told(std::slice::from_ref(&open), &[direct("open_copy")]);
        assert_eq!(word, "copied");
        assert!(says.contains("as soon as the master's event came"), "{says}");
        let (word, says) = told(&[open], &[event("open_copy", "done", None)]);
        assert_eq!(word, "copied_late");
        assert!(says.contains("late"), "{says}");
    }

    #[test]
    fn a_trade_that_was_skipped_says_by_what() {
        for (reason, part) in [
            ("late_open_price_moved", "slippage"),
            ("below_min", "under the broker's smallest"),
            ("symbol_unmapped", "no such symbol"),
        ] {
            let skip = event("skip_open", "skipped", Some(reason));
            let (word, says) = told(&[pair("skipped", Some(reason))], &[skip]);
            assert_eq!(word, "skipped");
            assert!(says.contains(part), "{says}");
        }
    }

    #[test]
    fn what_the_broker_refused_is_told_in_its_words() {
        let refused = event("open_copy", "rejected", Some("no_money: not enough free margin"));
        assert_eq!(refused.says, "the broker refused (no money): not enough free margin");
        let failed = pair("failed", Some("rejected_no_money"));
        let (word, says) = told(&[failed], &[refused]);
        assert_eq!(word, "failed");
        assert!(says.contains("not enough money"), "{says}");
    }

    #[test]
    fn an_order_that_the_gate_held_back_and_a_later_plan_sent_is_repaired() {
        let dropped = event("open_copy", "not_sent", Some("gate"));
        let (word, says) =
            told(&[pair("open", None)], &[dropped.clone(), event("open_copy", "done", None)]);
        assert_eq!(word, "repaired");
        assert!(says.contains("held back"), "{says}");
        let (word, says) = told(&[], &[dropped]);
        assert_eq!(word, "tried");
        assert!(says.contains("permission"), "{says}");
    }

    #[test]
    fn a_copy_of_an_earlier_owner_is_adopted_and_a_second_one_is_told() {
        let adopted = event("adopt_copy", "done", Some("tag"));
        let duplicate = event("close_duplicate", "done", Some("duplicate"));
        let (word, says) = told(&[pair("open", None)], &[adopted, duplicate]);
        assert_eq!(word, "adopted");
        assert!(says.contains("a second copy was found and closed"), "{says}");
    }

    #[test]
    fn nothing_known_is_not_taken_for_not_copied() {
        let (word, says) = told(&[], &[]);
        assert_eq!(word, Verdict::UNKNOWN);
        assert!(says.contains("no node has recorded anything"), "{says}");
    }

    #[test]
    fn every_word_of_a_row_has_a_sentence() {
        let unknown = "does not know";
        for reason in SkipReason::ALL {
            assert!(!why_not(reason.as_str()).contains(unknown));
        }
        for reason in FailReason::ALL {
            assert!(!why_not(reason.as_str()).contains(unknown));
        }
        for cause in CloseCause::ALL {
            assert!(!why_ended(cause.as_str()).contains(unknown));
        }
        for how in EndedHow::ALL {
            assert!(!why_ended(how.as_str()).contains(unknown));
        }
    }

    /// What `node/WHY.md` shows: a heading, what to do, and the rows.
    fn cases() -> Vec<(&'static str, &'static str, Vec<PairTold>, Vec<EventTold>)> {
        let skipped = |reason| {
            (vec![pair("skipped", Some(reason))], vec![event("skip_open", "skipped", Some(reason))])
        };
        let open = || vec![pair("open", None)];
        let case = |heading, advice, (pairs, events)| (heading, advice, pairs, events);
        vec![
            case("Copied", "Nothing.", (open(), vec![direct("open_copy")])),
            case(
                "Copied late",
                "Look why nobody copied it at once: `lockstep events tail` around that time, takeovers and \
                 gaps on the dashboards.",
                (open(), vec![event("open_copy", "done", None)]),
            ),
            case(
                "Skipped: the price had moved",
                "Nothing, or a larger `--slippage` on the link. The trade is not copied later.",
                skipped("late_open_price_moved"),
            ),
            case(
                "Skipped: too small",
                "A larger `--value` on the link, or `--below-min use-min`.",
                skipped("below_min"),
            ),
            case(
                "Skipped: the symbol has another name there",
                "`--symbol MASTER=FOLLOWER` or `--symbol-suffix` on the link.",
                skipped("symbol_unmapped"),
            ),
            case(
                "Refused by the broker",
                "What the broker says. A refusal that would come again is final for the trade.",
                (
                    vec![pair("failed", Some("rejected_no_money"))],
                    vec![event("open_copy", "rejected", Some("no_money: not enough free margin"))],
                ),
            ),
            case(
                "Held back by the gate, and repaired later",
                "Look why the lease was not confirmed: the *Lease and takeover* dashboard, the node's minutes in \
                 `lockstep status`.",
                (
                    open(),
                    vec![
                        event("open_copy", "not_sent", Some("gate")),
                        event("open_copy", "done", None),
                    ],
                ),
            ),
            case(
                "Adopted after a takeover",
                "Nothing: the node that opened it ended before its row was written.",
                (open(), vec![event("adopt_copy", "done", Some("tag"))]),
            ),
            case(
                "A second copy was closed",
                "A node stood still, or a packet was late, for longer than fence and settle time: look at the \
                 alert LockstepDuplicateFound in the runbook.",
                (
                    open(),
                    vec![direct("open_copy"), event("close_duplicate", "done", Some("duplicate"))],
                ),
            ),
        ]
    }

    fn page() -> String {
        let mut page = "# Why a trade was copied, or was not\n\n\
             What `lockstep why LINK TICKET` says in the cases that come up most, and what to do. Made from \
             the code, and compared with it by a test; write it anew with `LOCKSTEP_BLESS=1 cargo test -p \
             lockstep --lib story`. The verb shows times, prices, volumes and the node as well.\n"
            .to_owned();
        for (heading, advice, pairs, events) in cases() {
            let verdict = verdict(&pairs, &events);
            page +=
                &format!("\n## {heading}\n\n```\nverdict: {} ({})\n", verdict.says, verdict.word);
            for event in &events {
                page += &format!("  {}, {}: {}\n", event.action, event.outcome, event.says);
            }
            page += &format!("```\n\n{advice}\n");
        }
        page
    }

    #[test]
    fn page_of_stories_is_what_the_verb_says() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/WHY.md");
        if std::env::var_os("LOCKSTEP_BLESS").is_some() {
            std::fs::write(path, page()).unwrap();
        }
        assert_eq!(std::fs::read_to_string(path).unwrap(), page(), "see its first lines");
        // Each trade of the page is another story.
        let verdicts: std::collections::BTreeSet<String> =
            cases().iter().map(|(_, _, pairs, events)| verdict(pairs, events).says).collect();
        assert_eq!(verdicts.len(), cases().len());
    }
}
