-- What an account's session last said of itself. Written at a rate, so it is not on the account
-- row: a batch of these must never touch the row that holds the lease.

create table account_status (
    account_id      bigint      primary key,
    lease_token     bigint      not null,
    node_id         text        not null,
    session         text        not null,
    detail          text,
    balance         numeric,
    equity          numeric,
    currency        text,
    positions_open  integer,
    pendings_open   integer,
    -- When the session said so, by the node's clock.
    reported_at     timestamptz not null,
    written_at      timestamptz not null default clock_timestamp(),

    constraint account_status_account_exists foreign key (account_id)
        references trading_accounts (id) on delete cascade,
    constraint account_status_session_word check (session ~ '^[a-z][a-z_]{1,31}$'),
    constraint account_status_detail_short check (length(detail) <= 300),
    constraint account_status_currency_short check (length(currency) <= 64),
    constraint account_status_counts_not_negative check (positions_open >= 0 and pendings_open >= 0),
    constraint account_status_token_not_negative check (lease_token >= 0)
) with (fillfactor = 70);
