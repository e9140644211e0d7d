//! `lockstep link`: add, list, switch on and off.

use super::account::{Rule, Switched, refused};
use super::table::{TableRow, print_rows};
use super::{CliError, DatabaseArg, block_on, out};
use crate::directory::{self, LinkRow, NewLink};
use clap::{Args, Subcommand, ValueEnum};
use reconcile::{AboveMax, BelowMin};
use rust_decimal::Decimal;
use schemas::{AccountId, LinkId, Magic, Symbol};
use std::collections::BTreeMap;

/// Arguments of `lockstep link`.
#[derive(Debug, Args)]
pub struct LinkArgs {
    #[command(flatten)]
    database: DatabaseArg,
    /// Print JSON.
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    verb: LinkVerb,
}

#[derive(Debug, Subcommand)]
enum LinkVerb {
    /// Add a link: the follower copies the master from now on.
    Add(Box<AddArgs>),
    /// List links.
    List,
    /// Copy again, from now on; and look anew whether the broker keeps tags.
    Enable {
        /// Number of the link.
        link: LinkId,
    },
    /// Open nothing new; what is open is still managed and closed with the master's.
    Disable {
        /// Number of the link.
        link: LinkId,
    },
}

/// A link in words: those of `lockstep link add`, and of a file that is applied.
#[derive(Debug, Args)]
pub(super) struct AddArgs {
    /// Master: name or number of its account.
    pub(super) master: String,
    /// Follower: name or number of its account.
    pub(super) follower: String,
    /// How volumes are computed.
    #[arg(long, value_enum, default_value = "multiplier")]
    sizing: SizingWord,
    /// Multiplier, lots, or the factor on the ratio.
    #[arg(long, default_value = "1", allow_negative_numbers = true)]
    value: Decimal,
    /// The number that marks this link's orders at the follower's broker; default: a free one.
    #[arg(long, allow_negative_numbers = true)]
    magic: Option<Magic>,
    /// Below the smallest volume: `skip` or `use-min`.
    #[arg(long, value_enum, default_value = "skip")]
    below_min: BelowMinWord,
    /// Above the largest volume: `clamp` or `skip`.
    #[arg(long, value_enum, default_value = "clamp")]
    above_max: AboveMaxWord,
    /// How far, in points, the price may have moved for a copy that comes late.
    #[arg(long, default_value_t = 20, allow_negative_numbers = true,
        value_parser = clap::value_parser!(u32).range(..=SLIPPAGE_POINTS_MAX))]
    slippage_points: u32,
    /// Scale by the contract sizes of the two brokers.
    #[arg(long)]
    align_contract: bool,
    /// Do not copy stop loss and take profit.
    #[arg(long)]
    no_stops: bool,
    /// Do not copy pending orders.
    #[arg(long)]
    no_pendings: bool,
    /// Trade the other side.
    #[arg(long)]
    reverse: bool,
    /// Also copy what the master already has open.
    #[arg(long)]
    sync_existing: bool,
    /// A symbol that has another name at the follower: MASTER=FOLLOWER. May be given several times.
    #[arg(long = "symbol", value_name = "MASTER=FOLLOWER", value_parser = symbol_pair)]
    symbols: Vec<(Symbol, Symbol)>,
    /// What the follower's broker appends to every symbol.
    #[arg(long, default_value = "", value_parser = symbol_suffix)]
    symbol_suffix: String,
    /// Add it switched off.
    #[arg(long)]
    pub(super) disabled: bool,
}

impl AddArgs {
    /// The link that these words describe; what is wrong with them otherwise.
    pub(super) fn link(self, master: AccountId, follower: AccountId) -> Result<NewLink, String> {
        let sizing = directory::sizing_from(self.sizing.word(), self.value)
            .map_err(|problem| format!("--value {problem}"))?;
        if self.value > VALUE_MAX {
            return Err(format!("--value must be at most {VALUE_MAX}, got {}", self.value));
        }
        Ok(NewLink {
            master,
            follower,
            magic: self.magic,
            enabled: !self.disabled,
            sizing,
            below_min: match self.below_min {
                BelowMinWord::Skip => BelowMin::Skip,
                BelowMinWord::UseMin => BelowMin::UseMin,
            },
            above_max: match self.above_max {
                AboveMaxWord::Clamp => AboveMax::Clamp,
                AboveMaxWord::Skip => AboveMax::Skip,
            },
            align_contract: self.align_contract,
            slippage_points: self.slippage_points,
            copy_stops: !self.no_stops,
            copy_pendings: !self.no_pendings,
            reverse: self.reverse,
            sync_existing: self.sync_existing,
            symbol_map: self.symbols.into_iter().collect::<BTreeMap<_, _>>(),
            symbol_suffix: self.symbol_suffix,
        })
    }
}

/// The words of a link's rules and what each is: what two links are compared and shown by.
pub(super) fn words(link: &NewLink) -> Vec<(&'static str, String)> {
    let (sizing, value) = directory::sizing_columns(&link.sizing);
    let symbols: Vec<String> =
        link.symbol_map.iter().map(|(master, follower)| format!("{master}={follower}")).collect();
    vec![
        ("disabled", (!link.enabled).to_string()),
        ("sizing", sizing.to_owned()),
        ("value", value.normalize().to_string()),
        ("below-min", link.below_min_word().replace('_', "-")),
        ("above-max", link.above_max_word().to_owned()),
        ("slippage-points", link.slippage_points.to_string()),
        ("align-contract", link.align_contract.to_string()),
        ("no-stops", (!link.copy_stops).to_string()),
        ("no-pendings", (!link.copy_pendings).to_string()),
        ("reverse", link.reverse.to_string()),
        ("sync-existing", link.sync_existing.to_string()),
        ("symbol", symbols.join(" ")),
        ("symbol-suffix", link.symbol_suffix.clone()),
    ]
}

#[derive(Debug, Clone, Copy, ValueEnum)]
#[value(rename_all = "snake_case")]
enum SizingWord {
    /// Master's lots times the value.
    Multiplier,
    /// Always the value, in lots.
    FixedLots,
    /// Master's lots times the value times follower's balance over master's balance.
    BalanceRatio,
    /// The same with equity.
    EquityRatio,
}

impl SizingWord {
    fn word(self) -> &'static str {
        match self {
            SizingWord::Multiplier => "multiplier",
            SizingWord::FixedLots => "fixed_lots",
            SizingWord::BalanceRatio => "balance_ratio",
            SizingWord::EquityRatio => "equity_ratio",
        }
    }
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum BelowMinWord {
    Skip,
    UseMin,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum AboveMaxWord {
    Clamp,
    Skip,
}

/// Longest suffix that a link can have; the table's own rule.
const SUFFIX_CHARS_MAX: usize = 16;
/// More is no limit any more: at five digits it is a price of ten.
const SLIPPAGE_POINTS_MAX: i64 = 1_000_000;
/// Largest value of a sizing; the table's own rule.
const VALUE_MAX: Decimal = Decimal::from_parts(1_000_000, 0, 0, false, 0);

fn symbol_suffix(text: &str) -> Result<String, String> {
    if text.chars().count() <= SUFFIX_CHARS_MAX {
        Ok(text.to_owned())
    } else {
        Err(format!("must be at most {SUFFIX_CHARS_MAX} characters"))
    }
}

fn symbol_pair(text: &str) -> Result<(Symbol, Symbol), String> {
    let (master, follower) =
        text.split_once('=').ok_or_else(|| format!("expected MASTER=FOLLOWER, got {text:?}"))?;
    let symbol = |s: &str| Symbol::new(s).map_err(|e| e.to_string());
    Ok((symbol(master)?, symbol(follower)?))
}

impl TableRow for LinkRow {
    const HEAD: &'static [&'static str] = &[
        "id",
        "master",
        "follower",
        "magic",
        "enabled",
        "mode",
        "sizing",
        "value",
        "slippage",
        "copies from",
        "tags",
        "options",
    ];
    fn cells(&self) -> Vec<String> {
        vec![
            self.id.to_string(),
            self.master.clone(),
            self.follower.clone(),
            self.magic.to_string(),
            if self.enabled { "yes" } else { "no" }.into(),
            self.effective_mode.to_string(),
            self.sizing.clone(),
            self.sizing_value.to_string(),
            format!("{} pt", self.slippage_points),
            self.copy_from.clone(),
            match &self.untaggable_since {
                Some(since) => format!("not kept since {since}"),
                None => "-".into(),
            },
            self.options.join(" "),
        ]
    }
}

/// Runs `lockstep link`.
pub fn run(args: LinkArgs) -> Result<(), CliError> {
    block_on(async {
        let mut db = match &args.verb {
            LinkVerb::List => args.database.connect().await?,
            LinkVerb::Add(_) | LinkVerb::Enable { .. } | LinkVerb::Disable { .. } => {
                args.database.connect_to_write().await?
            }
        };
        match args.verb {
            LinkVerb::Add(add) => {
                let between = format!("link from {} to {}", add.master, add.follower);
                let new = new_link(&mut db, *add).await?;
                let id = directory::add_link(&mut db, &new)
                    .await
                    .map_err(|error| refused(error, |rule| explain(rule, &between, new.magic)))?;
                if args.json {
                    return out::json(&serde_json::json!({ "id": id }));
                }
                out::line(format_args!("link {id} added"))
            }
            LinkVerb::List => print_rows(&directory::list_links(&mut db).await?, args.json),
            LinkVerb::Enable { link } => switch(&mut db, link, true, args.json).await,
            LinkVerb::Disable { link } => switch(&mut db, link, false, args.json).await,
        }
    })?
}

/// Why the database refused a link, where that is a rule of links.
pub(super) fn explain(rule: &Rule<'_>, between: &str, magic: Option<Magic>) -> Option<String> {
    match rule.name {
        "copy_links_magic_unique_per_follower" => {
            let magic = magic.map_or_else(|| "the next free one".to_owned(), |m| m.to_string());
            Some(format!("--magic {magic}: another link of this follower has it, or had it"))
        }
        "copy_links_one_per_master_and_follower" => {
            Some(format!("{between}: there is one already"))
        }
        "copy_links_no_cycle" => Some(format!("{between}: would close a cycle of copies")),
        _ => None,
    }
}

async fn new_link(db: &mut sqlx::PgConnection, add: AddArgs) -> Result<NewLink, CliError> {
    let words = (add.master.clone(), add.follower.clone());
    // Wrong words are told before names that are not there.
    let unplaced = add.link(AccountId::MIN, AccountId::MIN).map_err(CliError::Usage)?;
    let master = directory::account_id(db, &words.0).await?;
    let follower = directory::account_id(db, &words.1).await?;
    let new = NewLink { master, follower, ..unplaced };
    if new.master == new.follower {
        return Err(CliError::Usage(format!("link from {} to itself", words.0)));
    }
    let accounts = directory::list_accounts(db).await?;
    if accounts.iter().any(|account| account.id == new.follower && account.platform == "external") {
        return Err(CliError::Usage(format!("follower {:?}: {NO_FOLLOWER}", words.1)));
    }
    Ok(new)
}

/// Why an external account is no follower.
pub(super) const NO_FOLLOWER: &str = "an external account only publishes; no node can trade on it";

async fn switch(
    db: &mut sqlx::PgConnection,
    link: LinkId,
    enabled: bool,
    json: bool,
) -> Result<(), CliError> {
    let changed = directory::enable_link(db, link, enabled).await?;
    if json {
        return out::json(&Switched { id: link, enabled, changed });
    }
    let word = if enabled { "enabled" } else { "disabled" };
    out::line(format_args!("link {link} {}{word}", if changed { "" } else { "was already " }))
}
