//! Random lives of one link: masters trade, brokers stop out, answers and rows are lost, plans
//! are interrupted. Whatever happens, a master ticket is opened once at most (S4, S5), and when
//! it is quiet the follower agrees with the master (L4).

use crate::action::{CopyAction, CopyStep};
use crate::fixture::*;
use crate::input::Limits;
use crate::pair::Pairs;
use crate::tag;
use proptest::collection::vec;
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::time::Duration;

#[derive(Debug, Clone)]
enum Happening {
    MasterOpens(u64),
    MasterCloses(u64),
    MasterHalves(u64),
    /// The broker ends the copy, and may overwrite its comment.
    CopyStopsOut {
        which: usize,
        overwrites: bool,
    },
    RowsAreWritten,
    /// A new owner starts from the rows that were written.
    Takeover,
    /// A plan of which only the first steps are carried out.
    Reconcile {
        steps: usize,
        answers: bool,
    },
    LiveOpens(u64),
    TimePasses(u64),
}

fn any_happening() -> impl Strategy<Value = Happening> {
    let ticket = 1..=4u64;
    prop_oneof![
        4 => ticket.clone().prop_map(Happening::MasterOpens),
        2 => ticket.clone().prop_map(Happening::MasterCloses),
        2 => ticket.clone().prop_map(Happening::MasterHalves),
        2 => (0..4usize, any::<bool>())
            .prop_map(|(which, overwrites)| Happening::CopyStopsOut { which, overwrites }),
        2 => Just(Happening::RowsAreWritten),
        3 => Just(Happening::Takeover),
        6 => (0..4usize, prop::bool::weighted(0.7))
            .prop_map(|(steps, answers)| Happening::Reconcile { steps, answers }),
        3 => ticket.prop_map(Happening::LiveOpens),
        2 => (1..20u64).prop_map(Happening::TimePasses),
    ]
}

fn pass(scene: &mut Scene, by: Duration) {
    scene.now = scene.now.plus(by);
    scene.master.at = scene.now;
    scene.follower.at = scene.now;
    for quote in scene.quotes.values_mut() {
        quote.at = scene.now;
    }
}

fn happen(scene: &mut Scene, written: &mut Pairs, used: &mut BTreeSet<u64>, what: Happening) {
    match what {
        Happening::MasterOpens(ticket) => {
            // A ticket is never used again.
            if used.insert(ticket) {
                let mut position = master_position(ticket);
                position.opened_at = scene.now;
                scene.master.book.positions.insert(mt(ticket), position);
            }
        }
        Happening::MasterCloses(ticket) => {
            scene.master.book.positions.remove(&mt(ticket));
        }
        Happening::MasterHalves(ticket) => {
            if let Some(position) = scene.master.book.positions.get_mut(&mt(ticket)) {
                position.lots = lots(if position.lots == lots("1") { "0.5" } else { "0.25" });
            }
        }
        Happening::CopyStopsOut { which, overwrites } => {
            if which < scene.follower.positions.len() {
                let position = scene.follower.positions.remove(which);
                let mut ended = closed_trade(position.ticket.get(), &position.comment);
                (ended.lots, ended.open_price) = (position.lots, position.open_price);
                (ended.opened_at, ended.closed_at) = (position.opened_at, scene.now);
                if overwrites {
                    ended.comment = "[sl]".to_owned();
                }
                scene.history.trades.push(ended);
            }
        }
        Happening::RowsAreWritten => *written = scene.pairs.clone(),
        Happening::Takeover => scene.pairs = written.clone(),
        Happening::Reconcile { steps, answers } => {
            let plan = scene.plan();
            scene.execute_answering(&plan, steps, answers);
        }
        Happening::LiveOpens(ticket) => {
            // The owner that saw everything since its reconcile acts on the event alone.
            // After a takeover it reconciles first, so a ticket without a row is a new one.
            let is_new = !scene.opened.contains(&tag_of(ticket));
            let has_row = scene.pairs.main(mt(ticket)).is_some();
            let opens =
                |action: &CopyAction| matches!(action.steps[..], [CopyStep::OpenCopy { .. }]);
            let action = scene.live(ticket).action.filter(opens);
            assert!(action.is_none() || !has_row, "a ticket with a row was opened again");
            if let Some(action) = action.filter(|_| is_new) {
                let mut plan = Scene::new().plan();
                plan.actions = vec![action];
                scene.execute(&plan, usize::MAX);
            }
        }
        Happening::TimePasses(seconds) => pass(scene, Duration::from_secs(seconds)),
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: ProptestConfig::default().cases.max(512),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn ticket_is_opened_once_at_most_and_quiet_brings_agreement(
        happenings in vec(any_happening(), 1..40),
        renumbers in any::<bool>(),
    ) {
        let mut scene = Scene::new();
        scene.limits = Limits { absent_max: usize::MAX, ..Limits::default() };
        scene.partial = if renumbers { Partial::Renumbers } else { Partial::KeepsTicket };
        let (mut written, mut used) = (Pairs::default(), BTreeSet::new());
        for what in happenings {
            happen(&mut scene, &mut written, &mut used, what);
            pass(&mut scene, Duration::from_secs(1));
            let once: BTreeSet<&String> = scene.opened.iter().collect();
            prop_assert_eq!(once.len(), scene.opened.len(), "opened twice: {:?}", scene.opened);
        }

        pass(&mut scene, Duration::from_secs(60));
        let plan = scene.plan();
        scene.execute(&plan, usize::MAX);
        prop_assert_eq!(scene.plan().actions, vec![]);
        for position in &scene.follower.positions {
            let tagged = tag::decode(&position.comment).map(|(_, ticket)| ticket);
            let mut rows = scene.pairs.rows().filter(|p| p.follower_ticket == Some(position.ticket));
            let Some(ticket) = tagged.or_else(|| rows.next().map(|p| p.master_ticket)) else {
                continue; // A rest without tag and row: reported and left alone (H56).
            };
            let master = scene.master.book.positions.get(&ticket);
            prop_assert!(master.is_some(), "a copy of {ticket}, which the master has not");
            let target = master.unwrap().lots.get() / dec("2");
            prop_assert!(position.lots.get() <= dec("0.5") && position.lots.get() >= target - dec("0.01"));
        }
    }
}
