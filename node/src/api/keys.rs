//! Requests that come again: what was answered the first time, by the key that the client gave.
//!
//! Decides: whether a request is new, under way, or was answered before.
//!
//! Invariants:
//! 1. A key belongs to one token and one request; used for another one it is refused.
//! 2. Only what is done for good is remembered: after a refusal the same key may be tried again.
//! 3. At most [`KEYS_MAX`] are remembered; the oldest go first.
//!
//! Not covered: another process. It does not know the key, and need not: a copy that is closed is
//! answered as closed by whoever has the account.

use super::act::Closed;
use super::problem::Problem;
use parking_lot::Mutex;
use schemas::{LinkId, MasterTicket};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Keys that are remembered at most (chosen: about 200 KiB).
pub(super) const KEYS_MAX: usize = 1_024;

/// What a key was used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Fingerprint {
    pub(super) token: i64,
    pub(super) link: LinkId,
    pub(super) ticket: MasterTicket,
}

/// Where a request of a key stands.
#[derive(Debug)]
pub(super) enum Begun {
    /// It is the first.
    Now(UnderWay),
    /// It was answered before.
    Before(Closed),
}

/// The keys of this process.
#[derive(Debug, Clone, Default)]
pub(super) struct Keys {
    known: Arc<Mutex<Known>>,
}

#[derive(Debug, Default)]
struct Known {
    /// By token and key; no answer while it is under way.
    used: BTreeMap<(i64, String), (Fingerprint, Option<Closed>)>,
    /// Those with an answer, in their order.
    done: VecDeque<(i64, String)>,
}

impl Keys {
    /// A request with a key begins.
    pub(super) fn begin(&self, key: &str, asked: Fingerprint) -> Result<Begun, Problem> {
        let place = (asked.token, key.to_owned());
        let mut known = self.known.lock();
        match known.used.get(&place) {
            Some((before, _)) if *before != asked => {
                Err(Problem::conflict("this Idempotency-Key was used for another request"))
            }
            Some((_, Some(answer))) => Ok(Begun::Before(answer.clone())),
            Some((_, None)) => {
                Err(Problem::conflict("a request with this Idempotency-Key is under way"))
            }
            None => {
                known.used.insert(place.clone(), (asked, None));
                Ok(Begun::Now(UnderWay { keys: self.clone(), place: Some(place) }))
            }
        }
    }
}

/// A request of a key that is under way; forgotten when it is dropped without an answer.
#[derive(Debug)]
pub(super) struct UnderWay {
    keys: Keys,
    place: Option<(i64, String)>,
}

impl UnderWay {
    /// It is done for good.
    pub(super) fn done(mut self, answer: Closed) {
        let Some(place) = self.place.take() else { return };
        let mut known = self.keys.known.lock();
        if let Some(used) = known.used.get_mut(&place) {
            used.1 = Some(answer);
        }
        known.done.push_back(place);
        while known.done.len() > KEYS_MAX {
            if let Some(oldest) = known.done.pop_front() {
                known.used.remove(&oldest);
            }
        }
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        if let Some(place) = self.place.take() {
            self.keys.known.lock().used.remove(&place);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::act::closed_for_tests;

    fn asked(ticket: u64) -> Fingerprint {
        let ticket = MasterTicket::new(ticket).unwrap();
        Fingerprint { token: 1, link: LinkId::MIN, ticket }
    }

    fn begin(keys: &Keys, key: &str, ticket: u64) -> Option<UnderWay> {
        match keys.begin(key, asked(ticket)) {
            Ok(Begun::Now(under_way)) => Some(under_way),
            Ok(Begun::Before(_)) | Err(_) => None,
        }
    }

    #[test]
    fn a_key_gives_its_first_answer_again_and_is_for_one_request() {
        let keys = Keys::default();
        begin(&keys, "k", 1).unwrap().done(closed_for_tests());
        assert!(matches!(keys.begin("k", asked(1)), Ok(Begun::Before(_))));
        assert_eq!(keys.begin("k", asked(2)).unwrap_err().status(), 409);
        let other_token = Fingerprint { token: 2, ..asked(2) };
        assert!(matches!(keys.begin("k", other_token), Ok(Begun::Now(_))));
    }

    #[test]
    fn a_key_is_one_request_at_a_time_and_free_again_after_a_refusal() {
        let keys = Keys::default();
        let first = begin(&keys, "k", 1).unwrap();
        assert_eq!(keys.begin("k", asked(1)).unwrap_err().status(), 409);
        drop(first);
        assert!(begin(&keys, "k", 1).is_some());
    }

    #[test]
    fn the_oldest_keys_are_forgotten() {
        let keys = Keys::default();
        for n in 0..=KEYS_MAX {
            begin(&keys, &n.to_string(), 1).unwrap().done(closed_for_tests());
        }
        assert!(begin(&keys, "0", 1).is_some(), "forgotten");
        assert!(begin(&keys, "1", 1).is_none());
    }
}
