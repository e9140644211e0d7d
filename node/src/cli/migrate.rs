//! `lockstep migrate`: what the schema of the database is, and bringing it up to date.
//!
//! In: the migrations of this program, and the rows of `_sqlx_migrations`. Out: how each stands.
//! [`compare`] is pure.
//!
//! Every verb that writes brings the schema up to date first, and one that only reads never does; this
//! one is for whoever wants to see it before, or has another role do it.

use super::table::{TableRow, or_dash, render};
use super::{CliError, DatabaseArg, block_on, out};
use crate::database::{self, MIGRATOR};
use crate::directory;
use clap::{Args, Subcommand};
use serde::Serialize;
use sqlx::{PgConnection, Row};
use time::OffsetDateTime;

/// Arguments of `lockstep migrate`.
#[derive(Debug, Args)]
pub struct MigrateArgs {
    #[command(flatten)]
    database: DatabaseArg,
    /// Print JSON.
    #[arg(long, global = true)]
    json: bool,
    /// Say what would be applied, and apply nothing.
    #[arg(long)]
    dry_run: bool,
    #[command(subcommand)]
    verb: Option<MigrateVerb>,
}

#[derive(Debug, Subcommand)]
enum MigrateVerb {
    /// List every migration; exit code 1 unless all are applied as this program has them.
    Status,
}

/// How a migration stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum State {
    /// Applied as this program has it.
    Applied,
    /// Not applied.
    Missing,
    /// Applied with another text: the database is of another build.
    ChecksumDiffers,
    /// Its application was broken off.
    Failed,
    /// Applied, and not known here: the database is of a newer program.
    Newer,
}

impl State {
    fn as_str(self) -> &'static str {
        match self {
            State::Applied => "applied",
            State::Missing => "missing",
            State::ChecksumDiffers => "checksum differs",
            State::Failed => "failed",
            State::Newer => "newer than this program",
        }
    }
}

/// One migration, here or in the database.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Step {
    pub(super) version: i64,
    pub(super) description: String,
    pub(super) state: State,
    pub(super) applied_at: Option<String>,
}

impl TableRow for Step {
    const HEAD: &'static [&'static str] = &["version", "description", "state", "applied at"];
    fn cells(&self) -> Vec<String> {
        vec![
            format!("{:04}", self.version),
            self.description.clone(),
            self.state.as_str().to_owned(),
            or_dash(self.applied_at.clone()),
        ]
    }
}

/// A migration of this program.
struct Known {
    version: i64,
    description: String,
    checksum: Vec<u8>,
}

/// A row of the database.
struct Applied {
    version: i64,
    description: String,
    checksum: Vec<u8>,
    success: bool,
    at: OffsetDateTime,
}

fn known() -> Vec<Known> {
    let known = MIGRATOR.iter().filter(|m| !m.migration_type.is_down_migration());
    known
        .map(|migration| Known {
            version: migration.version,
            description: migration.description.to_string(),
            checksum: migration.checksum.to_vec(),
        })
        .collect()
}

/// How every migration stands, by version.
fn compare(known: &[Known], applied: &[Applied]) -> Vec<Step> {
    let of = |version: i64| applied.iter().find(|row| row.version == version);
    let ours = known.iter().map(|migration| {
        let row = of(migration.version);
        let state = match row {
            None => State::Missing,
            Some(row) if !row.success => State::Failed,
            Some(row) if row.checksum != migration.checksum => State::ChecksumDiffers,
            Some(_) => State::Applied,
        };
        Step {
            version: migration.version,
            description: migration.description.clone(),
            state,
            applied_at: row.map(|row| directory::rfc3339(row.at)),
        }
    });
    let is_known = |version: i64| known.iter().any(|migration| migration.version == version);
    let theirs = applied.iter().filter(|row| !is_known(row.version)).map(|row| Step {
        version: row.version,
        description: row.description.clone(),
        state: State::Newer,
        applied_at: Some(directory::rfc3339(row.at)),
    });
    let mut steps: Vec<Step> = ours.chain(theirs).collect();
    steps.sort_by_key(|step| step.version);
    steps
}

/// How the schema stands; applies nothing.
pub(super) async fn read(db: &mut PgConnection) -> Result<Vec<Step>, sqlx::Error> {
    let table: Option<String> = sqlx::query_scalar("select to_regclass('_sqlx_migrations')::text")
        .fetch_one(&mut *db)
        .await?;
    let rows = match table {
        None => Vec::new(),
        Some(_) => {
            let rows = "select version, description, checksum, success, installed_on \
                        from _sqlx_migrations order by version";
            sqlx::query(rows).fetch_all(&mut *db).await?
        }
    };
    let applied: Vec<Applied> = rows
        .iter()
        .map(|row| Applied {
            version: row.get("version"),
            description: row.get("description"),
            checksum: row.get("checksum"),
            success: row.get("success"),
            at: row.get("installed_on"),
        })
        .collect();
    Ok(compare(&known(), &applied))
}

/// What keeps this program from working on the database, in words.
pub(super) fn obstacles(steps: &[Step]) -> Vec<String> {
    let told = |step: &&Step| !matches!(step.state, State::Applied | State::Missing);
    let words = |step: &Step| {
        let Step { version, description, state, .. } = step;
        format!("migration {version:04} {description:?}: {}", state.as_str())
    };
    steps.iter().filter(told).map(words).collect()
}

/// Runs `lockstep migrate`.
pub fn run(args: MigrateArgs) -> Result<(), CliError> {
    let url = args.database.url()?;
    let missing = |error| CliError::missing("database", error);
    block_on(async {
        let mut db = database::connect(&url, "cli").await.map_err(missing)?;
        let before = read(&mut db).await?;
        let obstacles = obstacles(&before);
        let wanting = |steps: &[Step]| -> Vec<Step> {
            steps.iter().filter(|step| step.state == State::Missing).cloned().collect()
        };
        if matches!(args.verb, Some(MigrateVerb::Status)) {
            show(&before, args.json)?;
            let missing = wanting(&before).len();
            return match (missing, obstacles.is_empty()) {
                (0, true) => Ok(()),
                (0, false) => Err(CliError::No(obstacles.join("\n"))),
                (missing, _) => Err(CliError::No(
                    [vec![format!("{missing} migrations are missing")], obstacles]
                        .concat()
                        .join("\n"),
                )),
            };
        }
        if !obstacles.is_empty() {
            return Err(CliError::No(format!("nothing was applied:\n{}", obstacles.join("\n"))));
        }
        let todo = wanting(&before);
        if args.dry_run {
            return tell(&todo, "would be applied", args.json);
        }
        database::migrate(&url).await.map_err(missing)?;
        let after = read(&mut db).await?;
        let was_missing = |step: &Step| todo.iter().any(|missing| missing.version == step.version);
        let done: Vec<Step> = after.into_iter().filter(was_missing).collect();
        tell(&done, "applied", args.json)
    })?
}

fn tell(steps: &[Step], what: &str, json: bool) -> Result<(), CliError> {
    if json || !steps.is_empty() {
        show(steps, json)?;
    }
    if json {
        return Ok(());
    }
    match steps.len() {
        0 => out::line("the schema is up to date"),
        count => out::line(format_args!("{count} {what}")),
    }
}

fn show(steps: &[Step], json: bool) -> Result<(), CliError> {
    if json {
        return out::json(steps);
    }
    out::line(render(Step::HEAD, steps.iter().map(TableRow::cells)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known(version: i64, checksum: &[u8]) -> Known {
        Known { version, description: "d".to_owned(), checksum: checksum.to_vec() }
    }

    fn applied(version: i64, checksum: &[u8], success: bool) -> Applied {
        let at = OffsetDateTime::UNIX_EPOCH;
        let description = "d".to_owned();
        Applied { version, description, checksum: checksum.to_vec(), success, at }
    }

    #[test]
    fn each_migration_stands_as_the_database_and_the_program_say() {
        let known = [known(1, b"a"), known(2, b"b"), known(3, b"c"), known(5, b"e")];
        let rows = [
            applied(1, b"a", true),
            applied(2, b"other", true),
            applied(3, b"c", false),
            applied(9, b"z", true),
        ];
        let steps = compare(&known, &rows);
        let states: Vec<_> = steps.iter().map(|step| (step.version, step.state)).collect();
        assert_eq!(
            states,
            [
                (1, State::Applied),
                (2, State::ChecksumDiffers),
                (3, State::Failed),
                (5, State::Missing),
                (9, State::Newer)
            ]
        );
        let named = obstacles(&steps);
        assert_eq!(named.len(), 3, "{named:?}");
        assert!(named[0].contains("0002") && named[0].contains("checksum differs"), "{named:?}");
    }

    #[test]
    fn an_empty_database_lacks_every_migration() {
        let steps = compare(&super::known(), &[]);
        assert!(!steps.is_empty());
        assert!(steps.iter().all(|step| step.state == State::Missing));
    }
}
