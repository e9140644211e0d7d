//! The shortest story of a broken law: the same seed with as few faults as still break it.

use crate::oracle::Violation;
use crate::plan::{Mode, Plan};
use crate::world::World;

/// Runs that shortening may cost.
const RUNS_MAX: usize = 80;
/// Lines of a story.
const LINES_MAX: usize = 120;

fn breaks(plan: &Plan, law: &str) -> Option<Violation> {
    let mut world = World::new(plan.clone(), false);
    world.run();
    world.oracle.violation.filter(|violation| violation.law == law)
}

/// Takes fault after fault out, as long as the same law is still broken.
pub(crate) fn shorten(seed: u64, mode: Mode, violation: &Violation) -> Plan {
    let mut plan = Plan::draw(seed, mode);
    // Nothing after the violation matters.
    plan.faults.retain(|fault| fault.at <= violation.at);
    let mut runs = 0;
    let mut take = plan.faults.len().div_ceil(2);
    while take > 0 && runs < RUNS_MAX {
        let mut place = 0;
        while place < plan.faults.len() && runs < RUNS_MAX {
            let mut shorter = plan.clone();
            shorter.faults.drain(place..(place + take).min(plan.faults.len()));
            runs += 1;
            if breaks(&shorter, violation.law).is_some() {
                plan = shorter;
            } else {
                place += take;
            }
        }
        take /= 2;
    }
    plan
}

/// The lines that lead to the violation: the faults, the owners, and what names its subject.
pub(crate) fn tell(plan: &Plan) -> Vec<String> {
    let mut world = World::new(plan.clone(), true);
    world.run();
    let lines = world.trace.take().unwrap_or_default();
    let what = world.oracle.violation.map(|violation| violation.what).unwrap_or_default();
    let words: Vec<String> = subjects(&what);
    let matters = |line: &String| {
        line.contains("fault ")
            || line.contains("VIOLATION")
            || line.contains("claimed by")
            || line.contains("is killed")
            || words.iter().any(|word| line.contains(word.as_str()))
    };
    let mut story: Vec<String> = lines.into_iter().filter(matters).collect();
    let skip = story.len().saturating_sub(LINES_MAX);
    story.drain(..skip);
    story
}

/// The ticket and the account that a violation is about, as the trace writes them.
fn subjects(what: &str) -> Vec<String> {
    let mut words = Vec::new();
    if let Some(at) = what.find("TicketKey")
        && let Some(end) = what[at..].find('}')
    {
        words.push(what[at..=at + end].to_owned());
        let digits: Vec<&str> = what[at..at + end]
            .split(|c: char| !c.is_ascii_digit())
            .filter(|part| !part.is_empty())
            .collect();
        if let [link, ticket] = digits.as_slice() {
            words.push(format!("{link}/{ticket}"));
        }
    }
    if let Some(at) = what.find("account ") {
        let id: String = what[at + 8..].chars().take_while(char::is_ascii_digit).collect();
        if !id.is_empty() {
            words.push(format!("account {id} "));
        }
    }
    words
}
