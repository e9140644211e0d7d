//! Rounds: calm, faults under load, mending, and the settle check (L4); then the verdict.

use super::books::Books;
use super::check::broker::Copy;
use super::check::nodes::NodeNote;
use super::check::{Evidence, Finding, Law, MACHINE_LAG, lives};
use super::faults::{self, Span};
use super::load::{Load, Pace};
use super::schedule::{Kind, Schedule};
use super::tap::Tap;
use super::verdict::{Takeovers, Verdict, round};
use super::world::{NOTES_SUFFIX, World};
use super::{Done, timing};
use crate::oracle::differences_but;
use crate::world::wall;
use futures_util::future::try_join_all;
use parking_lot::Mutex;
use schemas::{LinkId, Micros};
use sqlx::Row;
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

/// Everything works, before each round.
const CALM: Duration = Duration::from_secs(3);
/// Load goes on so long after the last fault is mended.
const OVERLAP: Duration = Duration::from_secs(1);
/// A round takes about so long; none is begun that would end much later than asked for.
const ROUND: Duration = Duration::from_secs(25);
/// Every follower copies for the first time within this.
const START_LIMIT: Duration = Duration::from_secs(60);
/// Between two looks at whether everything is equal.
const LOOK_EVERY: Duration = Duration::from_millis(300);
/// How often the machine's lag is looked at.
const LAG_EVERY: Duration = Duration::from_millis(50);
/// A lag that makes everything else late as well.
const LAG_LONG: Duration = Duration::from_millis(100);
/// How often the disk is looked at.
const DISK_EVERY: Duration = Duration::from_millis(500);
/// A write to the disk that takes so long holds up every commit: a lease cycle has several, and its
/// transaction may be one second old.
const DISK_LONG: Duration = Duration::from_millis(250);
/// Words about one settle check at most.
const WORDS_MAX: usize = 30;

/// What to run.
#[derive(Debug, Clone)]
pub struct Settings {
    /// How long.
    pub lasts: Duration,
    /// From which the faults and the trades come.
    pub seed: u64,
    /// These kinds only; all if none is named.
    pub only: Vec<Kind>,
    /// Where evidence goes; it is removed when nothing is wrong.
    pub folder: PathBuf,
    /// Keep it in any case.
    pub keep: bool,
}

/// Runs, and says on the way what it does.
pub async fn run(settings: Settings, say: impl Fn(&str)) -> Done<Verdict> {
    let begun = Instant::now();
    std::fs::create_dir_all(&settings.folder)?;
    let world = World::start(&settings.folder, &say).await?;
    let tap = Tap::start(&world.nats.urls()).await?;
    let mut load = Load::start(&world, settings.seed).await?;
    say("waiting until every follower is owned and in step");
    let mut runner = Runner::new(&world);
    runner.settle(&load, START_LIMIT).await?;
    let mut schedule = Schedule::new(settings.seed, &settings.only);
    let mut verdict = Verdict { seed: settings.seed, ..Verdict::default() };
    let lag = Lag::start(&settings.folder)?;
    while runner.settled.iter().all(|settled| settled.differs.is_empty())
        && (verdict.rounds == 0 || begun.elapsed() + ROUND < settings.lasts)
    {
        let faults = schedule.round();
        let words: Vec<String> =
            faults.iter().map(|f| format!("{} {}", f.kind.word(), f.target)).collect();
        let took = runner.round(&mut load, faults.clone()).await?;
        verdict.rounds += 1;
        for fault in faults {
            *verdict.faults.entry(fault.kind.word()).or_default() += 1;
        }
        let took =
            took.map_or("not in time".to_owned(), |took| format!("{:.1} s", took.as_secs_f64()));
        say(&format!("round {}: {}; equal again after {took}", verdict.rounds, words.join(", ")));
    }
    verdict.machine_lag_max_ms = lag.max_ms();
    verdict.disk_lag_max_ms = lag.disk_max_ms();
    runner.spans.append(&mut lag.spans.lock());
    let evidence = runner.evidence(&tap, &load).await?;
    let mut outside = runner.unsettled();
    outside.extend(rows_dropped(&settings.folder)?);
    finish(&mut verdict, &evidence, &outside, &runner, &settings.folder)?;
    if verdict.is_clean() && !settings.keep {
        drop(runner);
        drop(load);
        drop(world);
        std::fs::remove_dir_all(&settings.folder)?;
    } else {
        dump(&world, &evidence, &settings.folder).await?;
        verdict.evidence = Some(settings.folder);
    }
    Ok(verdict)
}

/// What all nodes noted. A line that a killed process left unfinished is left out, with what
/// follows on it.
fn read_notes(folder: &Path) -> Done<Vec<NodeNote>> {
    let mut notes = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.to_string_lossy().ends_with(NOTES_SUFFIX) {
            let text = std::fs::read_to_string(&path)?;
            notes.extend(text.lines().filter_map(|line| serde_json::from_str(line).ok()));
        }
    }
    Ok(notes)
}

/// How late this process is woken, and how long a write to the disk takes: what a busy machine does
/// to everybody in the world. Long lags are kept as spans, which excuse what takes too long, and
/// nothing else.
struct Lag {
    max_us: Arc<AtomicU64>,
    disk_max_us: Arc<AtomicU64>,
    spans: Arc<Mutex<Vec<Span>>>,
    _task: JoinSet<()>,
}

impl Lag {
    fn start(folder: &Path) -> Done<Lag> {
        let max_us = Arc::new(AtomicU64::new(0));
        let disk_max_us = Arc::new(AtomicU64::new(0));
        let spans = Arc::new(Mutex::new(Vec::new()));
        let (seen, long) = (Arc::clone(&max_us), Arc::clone(&spans));
        let mut task = JoinSet::new();
        task.spawn(async move {
            loop {
                let (asleep, from) = (Instant::now(), wall());
                tokio::time::sleep(LAG_EVERY).await;
                let late = asleep.elapsed().saturating_sub(LAG_EVERY);
                seen.fetch_max(late.as_micros() as u64, Ordering::Relaxed);
                if late > LAG_LONG {
                    long.lock().push(lag_since(from));
                }
            }
        });
        let file = Arc::new(std::fs::File::create(folder.join("disk-probe"))?);
        let (seen, long) = (Arc::clone(&disk_max_us), Arc::clone(&spans));
        task.spawn(async move {
            loop {
                let (begun, from, file) = (Instant::now(), wall(), Arc::clone(&file));
                let written = tokio::task::spawn_blocking(move || {
                    (&*file).write_all(&[0])?;
                    file.sync_data()
                });
                let is_written = matches!(written.await, Ok(Ok(())));
                let took = begun.elapsed();
                seen.fetch_max(took.as_micros() as u64, Ordering::Relaxed);
                if is_written && took > DISK_LONG {
                    long.lock().push(lag_since(from));
                }
                tokio::time::sleep(DISK_EVERY).await;
            }
        });
        Ok(Lag { max_us, disk_max_us, spans, _task: task })
    }

    fn disk_max_ms(&self) -> f64 {
        round(self.disk_max_us.load(Ordering::Relaxed) as f64 / 1_000.0)
    }

    fn max_ms(&self) -> f64 {
        round(self.max_us.load(Ordering::Relaxed) as f64 / 1_000.0)
    }
}

/// The machine held everybody up until now.
fn lag_since(from: Micros) -> Span {
    Span { kind: MACHINE_LAG, node: None, excuses_extra: false, from, until: wall() }
}

/// How one settle check ended.
#[derive(Debug)]
struct Settled {
    took: Duration,
    /// What still differed at the limit, in words.
    differs: Vec<String>,
    missing: u64,
}

struct Runner<'a> {
    world: &'a World,
    spans: Vec<Span>,
    settled: Vec<Settled>,
    /// Copies whose open was lost on its way.
    given_up: BTreeSet<Copy>,
    books: Books,
}

impl<'a> Runner<'a> {
    fn new(world: &'a World) -> Self {
        Runner {
            world,
            spans: Vec::new(),
            settled: Vec::new(),
            given_up: BTreeSet::new(),
            books: Books::default(),
        }
    }

    /// One round; how long it took to be equal again.
    async fn round(
        &mut self,
        load: &mut Load,
        faults: Vec<super::schedule::Fault>,
    ) -> Done<Option<Duration>> {
        load.set_pace(Pace::Calm).await?;
        tokio::time::sleep(CALM).await;
        load.set_pace(Pace::Busy).await?;
        let wisher = load.wisher();
        let running = faults.into_iter().map(|fault| faults::run(self.world, &wisher, fault));
        self.spans.extend(try_join_all(running).await?);
        tokio::time::sleep(OVERLAP).await;
        load.set_pace(Pace::Quiet).await?;
        let mended = Instant::now();
        self.world.heal().await?;
        self.settle(load, timing::SETTLED_MAX).await?;
        let last = self.settled.last().expect("a settle check was just made");
        Ok(last.differs.is_empty().then(|| mended.elapsed()))
    }

    /// Looks until everything is as it must be, or the time is over.
    async fn settle(&mut self, load: &Load, limit: Duration) -> Done {
        let begun = Instant::now();
        loop {
            self.books.read(self.world).await?;
            let live = live_rows(self.world).await?;
            let strangers = strangers(&self.books, &live);
            let mut given_up = given_up(self.world, &self.books).await?;
            given_up.extend(strangers.iter().filter_map(copy_of));
            let unsure = strangers.iter().filter_map(copy_of).map(|(link, _)| link).collect();
            let (mut differs, missing) =
                copies_that_differ(self.world, load, &self.books, &given_up, &unsure);
            if differs.is_empty() {
                differs = rows_that_differ(self.world, &self.books, &live, &strangers).await?;
            }
            let took = begun.elapsed();
            if differs.is_empty() || took >= limit {
                differs.truncate(WORDS_MAX);
                self.given_up.extend(given_up);
                self.settled.push(Settled { took, differs, missing });
                return Ok(());
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    async fn evidence(&self, tap: &Tap, load: &Load) -> Done<Evidence> {
        let ledger = self.world.ledger().await?;
        let masters = self.world.masters.clone();
        Ok(Evidence {
            lives: lives(&masters, &load.truth(), &ledger),
            masters,
            links: self.world.links.clone(),
            audits: self.world.audits().await?,
            bus: tap.records(),
            notes: read_notes(&self.world.folder)?,
            spans: self.spans.clone(),
            ledger,
        })
    }

    /// L4 in words.
    fn unsettled(&self) -> Vec<Finding> {
        let differs = self.settled.iter().flat_map(|settled| &settled.differs);
        differs
            .map(|what| {
                let what = what.clone();
                Finding { law: Law::L4, at: wall(), account: None, copy: None, what }
            })
            .collect()
    }
}

/// In what followers differ from their masters, and how many copies are not there. On a link that is
/// unsure, because it has a copy that nobody knows, what was never opened may be that copy.
fn copies_that_differ(
    world: &World,
    load: &Load,
    books: &Books,
    given_up: &BTreeSet<Copy>,
    unsure: &BTreeSet<LinkId>,
) -> (Vec<String>, u64) {
    let mut differs = Vec::new();
    for link in &world.links {
        let master = load.state(link.master, books);
        let left_out = |ticket| {
            let copy = (link.link.link, ticket);
            let may_be_stranger = unsure.contains(&copy.0) && !books.opened.contains(&copy);
            given_up.contains(&copy) || may_be_stranger
        };
        let found = books.copies(link.link.link);
        differs.extend(differences_but(&master, &link.link, found, left_out));
    }
    let missing = differs.iter().filter(|words| words.ends_with("found None")).count() as u64;
    (differs, missing)
}

/// Copies of which nothing is missing: their open was sent, was never answered, and was not found
/// at the broker, which has none either; it is never sent again (H11). Or it was refused with
/// another price as often as it is tried (case 32), or skipped because the read that it was decided
/// from took longer than a quote is fresh (H57, H58). And those of which the broker has carried an
/// order out later than anybody waits for one.
async fn given_up(world: &World, books: &Books) -> Done<BTreeSet<Copy>> {
    let rows = sqlx::query(
        "select link_id, master_ticket, reason from pairs \
         where (state = 'failed' and reason in ('never_arrived', 'rejected_requote')) \
            or (state = 'skipped' and reason = 'stale_quote')",
    );
    let mut given_up = BTreeSet::new();
    for row in rows.fetch_all(&mut world.database().await?).await? {
        let ticket: i64 = row.try_get("master_ticket")?;
        let copy = (LinkId::from_i64(row.try_get("link_id")?)?, ticket.unsigned_abs());
        let reason: String = row.try_get("reason")?;
        if reason != "rejected_requote" || books.refused.contains(&copy) {
            given_up.insert(copy);
        }
    }
    given_up.retain(|copy| !books.opened.contains(copy));
    given_up.extend(&books.late);
    Ok(given_up)
}

/// Live pairs by link and master ticket: the copy's number, and the state.
type LiveRows = BTreeMap<(i64, i64), (Option<i64>, String)>;

async fn live_rows(world: &World) -> Done<LiveRows> {
    let pairs = sqlx::query(
        "select link_id, master_ticket, follower_ticket, state from pairs where state in ('sending', 'open', 'closing')",
    );
    let mut rows = LiveRows::new();
    for row in pairs.fetch_all(&mut world.database().await?).await? {
        let key = (row.try_get("link_id")?, row.try_get("master_ticket")?);
        rows.insert(key, (row.try_get("follower_ticket")?, row.try_get("state")?));
    }
    Ok(rows)
}

/// Open copies of which neither the broker nor a row says whose they are: the rest of a partial close
/// got a new number without the tag, and the row that was stored before went with a server whose
/// replica lacked it, and the node with it. They are only reported, and what may be their master's
/// trade is not opened again.
fn strangers(books: &Books, live: &LiveRows) -> BTreeSet<(i64, i64)> {
    let lost = books.renumbered.iter().filter(|key| books.open.contains_key(key));
    lost.filter(|key| !live.contains_key(key)).copied().collect()
}

fn copy_of(key: &(i64, i64)) -> Option<Copy> {
    Some((LinkId::from_i64(key.0).ok()?, key.1.unsigned_abs()))
}

/// L4 in the database: every account has one owner at work, and the live pairs are the open
/// copies.
async fn rows_that_differ(
    world: &World,
    books: &Books,
    rows: &LiveRows,
    strangers: &BTreeSet<(i64, i64)>,
) -> Done<Vec<String>> {
    let mut db = world.database().await?;
    let mut differs = Vec::new();
    let accounts = sqlx::query(
        "select a.id, a.node_id, a.lease_until > now() as leased, s.session, s.lease_token = a.lease_token as current \
         from trading_accounts a left join account_status s on s.account_id = a.id where a.platform = 'paper' and a.enabled",
    );
    for row in accounts.fetch_all(&mut db).await? {
        let (id, owner): (i64, Option<String>) = (row.try_get("id")?, row.try_get("node_id")?);
        let session: Option<String> = row.try_get("session")?;
        let is_current = row.try_get::<Option<bool>, _>("current")? == Some(true);
        let is_at_work = matches!(session.as_deref(), Some("copying" | "leading")) && is_current;
        if owner.is_none() || !row.try_get::<bool, _>("leased")? || !is_at_work {
            differs.push(format!("account {id}: owner {owner:?}, session {session:?}"));
        }
    }
    let open = &books.open;
    let keys: BTreeSet<_> = rows.keys().chain(open.keys()).copied().collect();
    for key in keys.difference(strangers) {
        let wanted = open.get(key).map(|ticket| (Some(*ticket), "open".to_owned()));
        let found = rows.get(key).cloned();
        if wanted != found {
            differs.push(format!(
                "pair row of link and ticket {key:?}: the broker says {wanted:?}, the row {found:?}"
            ));
        }
    }
    Ok(differs)
}

fn finish(
    verdict: &mut Verdict,
    evidence: &Evidence,
    outside: &[Finding],
    runner: &Runner<'_>,
    folder: &Path,
) -> Done {
    let report = evidence.check();
    verdict.orders = report.orders;
    verdict.opens = report.opens;
    verdict.duplicates = report.duplicates;
    verdict.excused_extras = report.excused_extras;
    verdict.min_deadline_margin_ms = report.margin_min_us.map(|us| round(us as f64 / 1_000.0));
    verdict.takeover_s = Takeovers::of(report.takeovers);
    verdict.given_up = runner.given_up.len() as u64;
    verdict.missing = runner.settled.iter().map(|settled| settled.missing).sum();
    let longest = runner.settled.iter().skip(1).map(|settled| settled.took).max();
    verdict.longest_divergence_s = round(longest.unwrap_or_default().as_secs_f64());
    verdict.rows_refused = rows_refused(folder)?;
    verdict.take(outside);
    verdict.take(&report.findings);
    let mut text = String::new();
    for finding in outside {
        text.push_str(&format!("{finding}\n"));
    }
    for finding in &report.findings {
        let mut story = evidence.story(finding);
        story.insert(0, finding.to_string());
        text.push_str(&(story.join("\n    ") + "\n"));
        if verdict.story.is_empty() || story.len() < verdict.story.len() {
            verdict.story = story;
        }
    }
    std::fs::write(folder.join("stories.txt"), text)?;
    Ok(())
}

/// The line that a node writes about a row that the tables do not take for what it says.
const DROPPED: &str = "row is refused and dropped";

/// Rows that nodes were refused, by the lines they write about each.
fn rows_refused(folder: &Path) -> Done<u64> {
    Ok(node_lines(folder, &["row is left out", DROPPED])?.len() as u64)
}

/// Rows that the tables do not take for what they say: no fault makes a row like that.
fn rows_dropped(folder: &Path) -> Done<Vec<Finding>> {
    let finding = |what| Finding { law: Law::L4, at: wall(), account: None, copy: None, what };
    Ok(node_lines(folder, &[DROPPED])?.into_iter().map(finding).collect())
}

/// The lines of all nodes that have one of these words.
fn node_lines(folder: &Path, words: &[&str]) -> Done<Vec<String>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "err") {
            let log = std::fs::read_to_string(&path)?;
            let lines = log.lines().filter(|line| words.iter().any(|w| line.contains(w)));
            found.extend(lines.map(str::to_owned));
        }
    }
    Ok(found)
}

/// Tables, bus and faults, one JSON object a line, beside the logs and the ledger.
async fn dump(world: &World, evidence: &Evidence, folder: &Path) -> Done {
    const TABLES: &[(&str, &str)] = &[
        (
            "trading_accounts",
            "select row_to_json(t)::text as row from trading_accounts t order by id",
        ),
        ("copy_links", "select row_to_json(t)::text as row from copy_links t order by id"),
        (
            "pairs",
            "select row_to_json(t)::text as row from pairs t order by link_id, master_ticket",
        ),
        ("copy_events", "select row_to_json(t)::text as row from copy_events t order by at"),
        (
            "account_status",
            "select row_to_json(t)::text as row from account_status t order by account_id",
        ),
    ];
    let mut db = world.database().await?;
    for (name, query) in TABLES {
        let rows = sqlx::query(*query).fetch_all(&mut db).await?;
        let rows: Vec<String> =
            rows.iter().map(|row| row.try_get("row")).collect::<Result<_, _>>()?;
        std::fs::write(folder.join(format!("{name}.jsonl")), rows.join("\n") + "\n")?;
    }
    for (number, audit) in evidence.audits.iter().enumerate() {
        std::fs::write(folder.join(format!("audit-{number}.jsonl")), lines(audit)?)?;
    }
    std::fs::write(folder.join("bus.jsonl"), lines(&evidence.bus)?)?;
    std::fs::write(folder.join("faults.jsonl"), lines(&evidence.spans)?)?;
    Ok(())
}

fn lines(values: &[impl serde::Serialize]) -> Done<String> {
    let mut text = String::new();
    for value in values {
        text.push_str(&serde_json::to_string(value)?);
        text.push('\n');
    }
    Ok(text)
}
