//! The database's own record of what was committed under which token.
//!
//! A deferred constraint trigger runs inside the commit of each row's transaction, after every
//! statement of it, and writes down the row, its writer's token and the token that is current
//! then. It is installed in the chaos world's database only.
//!
//! Inputs: a database after its migrations. Outputs: rows in the order of their commits, as far
//! as one sequence can tell.

use schemas::Micros;
use serde::{Deserialize, Serialize};
use sqlx::{PgConnection, Row};
use uuid::Uuid;

/// One committed row.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuditRow {
    /// Its place.
    pub id: i64,
    /// The database's clock shortly before the commit.
    pub at: Micros,
    /// What was written.
    pub fact: AuditFact,
}

/// What was written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AuditFact {
    /// A row of `pairs`.
    Pair(PairWrite),
    /// A row of `account_status`.
    Status {
        /// The account.
        account: i64,
        /// Token and owner in the row.
        writer: Tenure,
        /// Token and owner on the account row at the commit.
        now: Tenure,
        /// What the session says it does.
        session: String,
    },
    /// Owner, token or end of a lease changed.
    Lease {
        /// The account.
        account: i64,
        /// Before.
        before: Tenure,
        /// After.
        after: Tenure,
        /// End of the lease before; nothing if it had none.
        until_before: Option<Micros>,
        /// End of the lease after; nothing if it has none.
        until: Option<Micros>,
        /// How many accounts the new owner has at the commit.
        owned: i64,
    },
}

/// A row of `pairs` as it was committed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PairWrite {
    /// Its id.
    pub id: Uuid,
    /// Link.
    pub link: i64,
    /// Follower.
    pub follower: i64,
    /// Master ticket.
    pub master_ticket: i64,
    /// Follower ticket.
    pub follower_ticket: Option<i64>,
    /// State.
    pub state: String,
    /// Version within the token.
    pub version: i64,
    /// Token and owner in the row.
    pub writer: Tenure,
    /// Token and owner on the account row at the commit.
    pub now: Tenure,
    /// Live rows of this (link, master ticket) at the commit.
    pub live: i64,
}

impl PairWrite {
    /// The pair is not over.
    pub fn is_live(&self) -> bool {
        matches!(self.state.as_str(), "sending" | "open" | "closing")
    }
}

/// A token and who holds it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tenure {
    /// The token.
    pub token: i64,
    /// The node; nothing for a free account.
    pub node: Option<String>,
}

const INSTALL: &str = r"
create table chaos_audit (
    id               bigint generated always as identity primary key,
    at               timestamptz not null default clock_timestamp(),
    kind             text not null,
    account          bigint not null,
    pair             uuid, link bigint, master_ticket bigint, follower_ticket bigint,
    state            text, version bigint, live bigint,
    token            bigint, node text, token_now bigint, node_now text,
    until_before     timestamptz, until timestamptz, owned bigint
);

-- The plan is made while the tables are empty and kept: it must not read all of them later.
create function chaos_audit_pair() returns trigger language plpgsql security definer set enable_seqscan = off as $$
begin
    insert into public.chaos_audit (kind, account, pair, link, master_ticket, follower_ticket, state, version, live,
                                    token, node, token_now, node_now)
    select 'pair', new.follower_id, new.id, new.link_id, new.master_ticket, new.follower_ticket, new.state, new.version,
           (select count(*) from public.pairs p where p.link_id = new.link_id and p.master_ticket = new.master_ticket
              and p.state in ('sending', 'open', 'closing')),
           new.lease_token, new.node_id, a.lease_token, a.node_id
    from public.trading_accounts a where a.id = new.follower_id;
    return null;
end
$$;
create constraint trigger chaos_audit_pair after insert or update on pairs
    deferrable initially deferred for each row execute function chaos_audit_pair();

create function chaos_audit_status() returns trigger language plpgsql security definer as $$
begin
    insert into public.chaos_audit (kind, account, state, token, node, token_now, node_now)
    select 'status', new.account_id, new.session, new.lease_token, new.node_id, a.lease_token, a.node_id
    from public.trading_accounts a where a.id = new.account_id;
    return null;
end
$$;
create constraint trigger chaos_audit_status after insert or update on account_status
    deferrable initially deferred for each row execute function chaos_audit_status();

create function chaos_audit_lease() returns trigger language plpgsql security definer as $$
begin
    insert into public.chaos_audit (kind, account, token, node, token_now, node_now, until_before, until, owned)
    values ('lease', new.id, old.lease_token, old.node_id, new.lease_token, new.node_id,
            nullif(old.lease_until, '-infinity'), nullif(new.lease_until, '-infinity'),
            (select count(*) from public.trading_accounts a where a.node_id = new.node_id));
    return null;
end
$$;
create constraint trigger chaos_audit_lease after update on trading_accounts
    deferrable initially deferred for each row
    when (old.lease_token is distinct from new.lease_token or old.node_id is distinct from new.node_id
          or old.lease_until is distinct from new.lease_until)
    execute function chaos_audit_lease();
";

/// Puts table and triggers into a migrated database.
pub async fn install(db: &mut PgConnection) -> Result<(), sqlx::Error> {
    sqlx::raw_sql(INSTALL).execute(db).await.map(drop)
}

/// Everything that was committed, in order.
pub async fn read(db: &mut PgConnection) -> Result<Vec<AuditRow>, sqlx::Error> {
    const MICROS: &str = "select id, kind, account, pair, link, master_ticket, follower_ticket, state, version, live, \
         token, node, token_now, node_now, owned, (extract(epoch from at) * 1000000)::bigint as at_us, \
         (extract(epoch from until_before) * 1000000)::bigint as until_before_us, \
         (extract(epoch from until) * 1000000)::bigint as until_us from chaos_audit order by id";
    let rows = sqlx::query(MICROS).fetch_all(db).await?;
    rows.iter()
        .map(|row| {
            let writer = Tenure { token: row.try_get("token")?, node: row.try_get("node")? };
            let now = Tenure { token: row.try_get("token_now")?, node: row.try_get("node_now")? };
            let account = row.try_get("account")?;
            let instant = |name: &str| -> Result<Option<Micros>, sqlx::Error> {
                Ok(row.try_get::<Option<i64>, _>(name)?.map(Micros))
            };
            let fact = match row.try_get::<String, _>("kind")?.as_str() {
                "pair" => AuditFact::Pair(PairWrite {
                    id: row.try_get("pair")?,
                    link: row.try_get("link")?,
                    follower: account,
                    master_ticket: row.try_get("master_ticket")?,
                    follower_ticket: row.try_get("follower_ticket")?,
                    state: row.try_get("state")?,
                    version: row.try_get("version")?,
                    live: row.try_get("live")?,
                    writer,
                    now,
                }),
                "status" => {
                    AuditFact::Status { account, writer, now, session: row.try_get("state")? }
                }
                _ => AuditFact::Lease {
                    account,
                    before: writer,
                    after: now,
                    until_before: instant("until_before_us")?,
                    until: instant("until_us")?,
                    owned: row.try_get("owned")?,
                },
            };
            Ok(AuditRow { id: row.try_get("id")?, at: Micros(row.try_get("at_us")?), fact })
        })
        .collect()
}
