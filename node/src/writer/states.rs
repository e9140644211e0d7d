//! The states of a pair, as statements list them.
//!
//! They are written into a statement, and not bound, so that the planner sees the condition of the partial
//! index that belongs to them.

/// What a pair is while there is, or may be, something at the broker.
macro_rules! live_states {
    () => {
        "('sending', 'open', 'closing')"
    };
}
pub(crate) use live_states;

/// What a pair is once nothing follows any more.
macro_rules! ended_states {
    () => {
        "('closed', 'failed', 'skipped')"
    };
}
pub(crate) use ended_states;

#[cfg(test)]
mod tests {
    use reconcile::PairState;

    fn listed(is: fn(PairState) -> bool) -> String {
        let states = PairState::ALL.into_iter().filter(|state| is(*state));
        let words: Vec<String> = states.map(|state| format!("'{}'", state.as_str())).collect();
        format!("({})", words.join(", "))
    }

    #[test]
    fn statements_list_every_state_that_is_live_and_every_one_that_has_ended() {
        assert_eq!(live_states!(), listed(PairState::is_live));
        assert_eq!(ended_states!(), listed(PairState::is_terminal));
    }
}
