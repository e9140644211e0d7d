//! What the nodes recorded, joined: own times and stages of a span of time.

use crate::bench::rounds::Percentiles;
use lockstep::stamps::Line;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// The stages, in their order. `send` is the order call itself, and no part of own time.
pub(in crate::bench) const STAGES: [&str; 7] =
    ["callback_publish", "bus", "feed_follower", "plan", "executor", "permit", "send"];

/// One order that followed from a master's event.
#[derive(Debug, Clone, Copy)]
pub(in crate::bench) struct Copy {
    /// When the master's callback ran.
    pub(in crate::bench) called_back_ns: u64,
    /// From there to the instruction before the order call.
    pub(in crate::bench) own_ns: u64,
    /// Nanoseconds of each of [`STAGES`].
    pub(in crate::bench) stages_ns: [u64; STAGES.len()],
}

/// What all nodes of a world recorded.
#[derive(Debug)]
pub(in crate::bench) struct Recorded {
    /// Callbacks that became events, in the order of time.
    pub(in crate::bench) events_ns: Vec<u64>,
    /// Orders, in the order of their callbacks.
    pub(in crate::bench) copies: Vec<Copy>,
}

/// A stage, or its part of an own time.
#[derive(Debug, Clone, Copy, Serialize)]
pub(in crate::bench) struct Stage {
    /// Half of the orders spent at most this in it.
    pub(in crate::bench) p50_us: f64,
    /// 95 of 100.
    pub(in crate::bench) p95_us: f64,
}

/// Reads the files of all nodes.
pub(in crate::bench) fn read(files: &[PathBuf]) -> Recorded {
    let (mut called_back, mut published, mut sent) = (BTreeMap::new(), BTreeMap::new(), Vec::new());
    for file in files {
        let text = std::fs::read_to_string(file)
            .unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        for line in text.lines() {
            match serde_json::from_str(line).unwrap_or_else(|e| panic!("{line}: {e}")) {
                Line::CalledBack { master, epoch, seq, called_back_ns, .. } => {
                    called_back.insert((master, epoch, seq), called_back_ns);
                }
                Line::Published { master, epoch, seq, published_ns } => {
                    published.insert((master, epoch, seq), published_ns);
                }
                sent_line @ Line::Sent { .. } => sent.push(sent_line),
            }
        }
    }
    let joined = |line: &Line| copy_of(line, &called_back, &published);
    let mut copies: Vec<Copy> = sent.iter().filter_map(joined).collect();
    copies.sort_unstable_by_key(|copy| copy.called_back_ns);
    let mut events_ns: Vec<u64> = called_back.into_values().collect();
    events_ns.sort_unstable();
    Recorded { events_ns, copies }
}

type Instants = BTreeMap<(u64, u64, u64), u64>;

fn copy_of(line: &Line, called_back: &Instants, published: &Instants) -> Option<Copy> {
    let Line::Sent {
        master,
        epoch,
        seq,
        received_ns,
        taken_ns,
        decided_ns,
        turn_ns,
        called_ns,
        sent_ns,
        ..
    } = *line
    else {
        return None;
    };
    let place = (master, epoch, seq);
    let (called_back_ns, published_ns) = (*called_back.get(&place)?, *published.get(&place)?);
    let instants = [
        called_back_ns,
        // The client may have written it before its publisher's task went on.
        published_ns.min(received_ns),
        received_ns,
        taken_ns,
        decided_ns,
        turn_ns,
        called_ns,
        sent_ns,
    ];
    let mut stages_ns = [0; STAGES.len()];
    for (stage, pair) in stages_ns.iter_mut().zip(instants.windows(2)) {
        *stage = pair[1].saturating_sub(pair[0]);
    }
    Some(Copy { called_back_ns, own_ns: called_ns.saturating_sub(called_back_ns), stages_ns })
}

impl Recorded {
    /// Orders whose callback ran in a span.
    pub(in crate::bench) fn copies_in(&self, (from, to): (u64, u64)) -> &[Copy] {
        let place = |ns| self.copies.partition_point(|copy| copy.called_back_ns < ns);
        &self.copies[place(from)..place(to)]
    }

    /// Events whose callback ran in a span.
    pub(in crate::bench) fn events_in(&self, (from, to): (u64, u64)) -> usize {
        let place = |ns| self.events_ns.partition_point(|at| *at < ns);
        place(to) - place(from)
    }
}

/// Each stage over these orders; empty without orders.
pub(in crate::bench) fn of_copies(copies: &[Copy]) -> BTreeMap<&'static str, Stage> {
    let stage = |place: usize| {
        let all = copies.iter().map(|copy| copy.stages_ns[place]).collect();
        let Percentiles { p50_us, p95_us, .. } = Percentiles::of_ns(all)?;
        Some((STAGES[place], Stage { p50_us, p95_us }))
    };
    (0..STAGES.len()).filter_map(stage).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(lines: &[Line]) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        let text: String =
            lines.iter().map(|line| serde_json::to_string(line).unwrap() + "\n").collect();
        std::fs::write(file.path(), text).unwrap();
        file
    }

    #[test]
    fn stages_of_two_processes_are_joined_by_the_place_of_the_event_and_add_up_to_own_time() {
        let (master, epoch, seq) = (1, 2, 3);
        let lead = write(&[
            Line::CalledBack { master, epoch, seq, called_back_ns: 1_000, queued_ns: 1_500 },
            Line::Published { master, epoch, seq, published_ns: 3_000 },
        ]);
        let sent = Line::Sent {
            account: 7,
            master,
            epoch,
            seq,
            received_ns: 10_000,
            taken_ns: 12_000,
            decided_ns: 15_000,
            turn_ns: 15_500,
            called_ns: 16_000,
            sent_ns: 26_000,
        };
        let unknown = Line::Sent {
            account: 7,
            master,
            epoch,
            seq: 4,
            received_ns: 1,
            taken_ns: 1,
            decided_ns: 1,
            turn_ns: 1,
            called_ns: 1,
            sent_ns: 1,
        };
        let follow = write(&[sent, unknown]);
        let recorded = read(&[lead.path().to_owned(), follow.path().to_owned()]);
        assert_eq!(recorded.copies.len(), 1, "an event that nobody recorded has no own time");
        let copy = recorded.copies_in((1_000, 1_001))[0];
        assert_eq!(copy.own_ns, 15_000);
        assert_eq!(copy.stages_ns, [2_000, 7_000, 2_000, 3_000, 500, 500, 10_000]);
        assert_eq!(copy.stages_ns[..6].iter().sum::<u64>(), copy.own_ns);
        assert!(recorded.copies_in((1_001, 9_000)).is_empty());
        assert_eq!((recorded.events_in((0, 1_001)), recorded.events_in((1_001, 9_000))), (1, 0));
        assert_eq!(of_copies(&[copy])["bus"].p50_us, 7.0);
    }
}
