-- Passwords of accounts at their brokers, sealed: the database and its backups hold nothing that opens them.
-- A table of its own, because account rows are renewed many times a minute and are to stay small.

create table account_credentials (
    account_id   bigint      primary key,
    -- Which master key the row's own key is wrapped with; told from the key itself.
    key_id       text        not null,
    wrapped_key  bytea       not null,
    sealed       bytea       not null,
    changed_at   timestamptz not null default clock_timestamp(),

    constraint account_credentials_account_exists foreign key (account_id)
        references trading_accounts (id) on delete cascade,
    constraint account_credentials_key_id_word check (key_id ~ '^[0-9a-f]{16}$'),
    -- 12 bytes that are used once, what was sealed, and 16 bytes that prove it.
    constraint account_credentials_wrapped_key_whole check (length(wrapped_key) = 12 + 32 + 16),
    constraint account_credentials_sealed_short check (length(sealed) between 12 + 1 + 16 and 12 + 1024 + 16)
);
