//! The writer against its tables: one suite for memory and for a real Postgres, and what only a
//! real Postgres can show.

#![allow(clippy::unwrap_used, reason = "tests")]

mod postgres;
mod suite;
mod world;

use lockstep as _;

macro_rules! run_suite {
    ($world:ident: $($case:ident)+) => {
        $(
            #[tokio::test]
            async fn $case() {
                crate::suite::$case(&crate::world::$world::start().await).await;
            }
        )+
    };
}

macro_rules! suite_for {
    ($world:ident) => {
        run_suite! { $world:
            stale_live_row_of_the_old_owner_is_refused_while_its_ended_rows_go_in_and_its_writer_is_empty
            row_buffered_in_an_earlier_tenure_of_the_same_node_is_refused
            late_end_of_an_older_copy_does_not_end_the_new_live_pair
            confirmed_end_of_the_same_copy_ends_the_pair_whoever_tells_it
            ended_pair_does_not_come_back_to_life
            end_without_a_copy_from_a_former_owner_leaves_the_live_pair_alone
            late_decision_of_a_former_owner_does_not_forbid_the_row_of_a_copy
            end_of_a_copy_that_was_renumbered_ends_its_pair
            one_bad_row_in_a_hundred_costs_only_itself
            batch_that_is_sent_twice_is_stored_once
            lower_version_never_replaces_a_higher_one
            second_live_pair_of_one_ticket_is_refused
            pair_that_was_opened_and_does_not_say_which_copy_it_is_of_is_refused
            row_of_a_link_that_is_gone_is_dropped_and_the_account_is_flushed
            status_is_the_last_one_of_the_owner
            locked_account_row_holds_up_only_its_own_rows
            loaded_pairs_are_the_stored_ones_in_every_field
            what_a_broker_takes_as_a_volume_stays_until_it_says_otherwise
            load_that_fails_is_an_error
        }
    };
}

mod in_memory {
    suite_for!(MemoryWorld);
}

mod in_postgres {
    suite_for!(PostgresWorld);
}
