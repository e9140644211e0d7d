-- What an account's platform and name may be is kept by their types. A check of the table is made at
-- every update of any column, and a lease is renewed far more often than an account is named.
create domain lockstep_platform as text
    constraint trading_accounts_platform_word check (value ~ '^[a-z][a-z0-9]{1,15}$');
create domain lockstep_account_name as text
    constraint trading_accounts_name_word check (value ~ '^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$');

alter table trading_accounts
    drop constraint trading_accounts_platform_word,
    drop constraint trading_accounts_name_word,
    alter column platform type lockstep_platform,
    alter column name type lockstep_account_name;
