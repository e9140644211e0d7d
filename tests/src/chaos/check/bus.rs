//! S11 of the publishers and L6 of their snapshots, from what was heard on the bus.

use super::{Evidence, Finding, Law, Report};
use crate::chaos::tap::{BusRecord, Said};
use schemas::{AccountId, Epoch, Micros, Seq};
use std::collections::BTreeMap;
use std::time::Duration;

/// A publisher takes a snapshot for a reply at most this often: 250 ms, less what its timer and
/// its clock may differ by.
const SNAPSHOT_EVERY: Duration = Duration::from_millis(230);

pub(super) fn check(evidence: &Evidence, report: &mut Report) {
    same_place_twice(&evidence.bus, report);
    old_epochs(&evidence.bus, report);
    snapshots(&evidence.bus, report);
}

fn find(report: &mut Report, law: Law, record: &BusRecord, what: String) {
    let (at, account) = (record.at, Some(record.master));
    report.findings.push(Finding { law, at, account, copy: None, what });
}

/// One place in one epoch belongs to one event.
fn same_place_twice(bus: &[BusRecord], report: &mut Report) {
    let mut events: BTreeMap<(AccountId, Epoch, Seq), &BusRecord> = BTreeMap::new();
    for record in bus.iter().filter(|record| matches!(record.what, Said::Event(..))) {
        let place = (record.master, record.epoch, record.seq);
        let first = *events.entry(place).or_insert(record);
        if (&first.what, first.at) != (&record.what, record.at) {
            let what = format!(
                "two events at epoch {}, seq {}: {:?} and {:?}",
                record.epoch, record.seq, first.what, record.what
            );
            find(report, Law::S11, record, what);
        }
    }
}

/// Nothing is said or read under an epoch after a higher one has begun to speak.
fn old_epochs(bus: &[BusRecord], report: &mut Report) {
    let mut begins: BTreeMap<(AccountId, Epoch), Micros> = BTreeMap::new();
    for record in bus {
        let begin = begins.entry((record.master, record.epoch)).or_insert(record.at);
        *begin = (*begin).min(record.at);
    }
    for record in bus {
        let next = begins
            .range((record.master, record.epoch)..)
            .filter(|((master, epoch), _)| *master == record.master && *epoch > record.epoch)
            .map(|((_, epoch), begin)| (*begin, *epoch))
            .min();
        if let Some((begin, epoch)) = next.filter(|(begin, _)| record.at > *begin) {
            let late = record.at.since(begin);
            let what = format!(
                "{:?} under epoch {} {late:?} after epoch {epoch} had begun",
                record.what, record.epoch
            );
            find(report, Law::S11, record, what);
        }
    }
}

/// L6: at most one snapshot in 250 ms.
fn snapshots(bus: &[BusRecord], report: &mut Report) {
    let mut taken: BTreeMap<AccountId, Vec<&BusRecord>> = BTreeMap::new();
    for record in bus.iter().filter(|record| record.what == Said::Snapshot) {
        taken.entry(record.master).or_default().push(record);
    }
    for records in taken.values_mut() {
        records.sort_by_key(|record| record.at);
        for two in records.windows(2) {
            let apart = two[1].at.since(two[0].at);
            if apart < SNAPSHOT_EVERY && two[0].epoch == two[1].epoch && !apart.is_zero() {
                find(report, Law::L6, two[1], format!("a second snapshot after {apart:?}"));
            }
        }
    }
}
