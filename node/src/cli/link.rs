//! `lockstep link`: add, list, switch on and off.

use super::account::refused;
use super::table::{TableRow, print_rows};
use super::{CliError, DatabaseArg, block_on};
use crate::directory::{self, LinkRow, NewLink};
use clap::{Args, Subcommand, ValueEnum};
use reconcile::{AboveMax, BelowMin};
use rust_decimal::Decimal;
use schemas::{LinkId, Magic, Symbol};
use std::collections::BTreeMap;

/// Arguments of `lockstep link`.
#[derive(Debug, Args)]
pub struct LinkArgs {
    #[command(flatten)]
    database: DatabaseArg,
    #[command(subcommand)]
    verb: LinkVerb,
}

#[derive(Debug, Subcommand)]
enum LinkVerb {
    /// Add a link: the follower copies the master from now on.
    Add(Box<AddArgs>),
    /// List links.
    List {
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
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

#[derive(Debug, Args)]
struct AddArgs {
    /// Master: name or number of its account.
    master: String,
    /// Follower: name or number of its account.
    follower: String,
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
#[allow(clippy::print_stdout, reason = "a verb answers on stdout")]
pub fn run(args: LinkArgs) -> Result<(), CliError> {
    block_on(async {
        let mut db = args.database.connect().await?;
        match args.verb {
            LinkVerb::Add(add) => {
                let between = format!("link from {} to {}", add.master, add.follower);
                let new = new_link(&mut db, *add).await?;
                let id = directory::add_link(&mut db, &new)
                    .await
                    .map_err(|error| refused(error, |rule| explain(rule, &between, new.magic)))?;
                println!("link {id} added");
            }
            LinkVerb::List { json } => print_rows(&directory::list_links(&mut db).await?, json)?,
            LinkVerb::Enable { link } => switch(&mut db, link, true).await?,
            LinkVerb::Disable { link } => switch(&mut db, link, false).await?,
        }
        Ok(())
    })?
}

fn explain(rule: &str, between: &str, magic: Option<Magic>) -> Option<String> {
    match rule {
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
    let sizing = directory::sizing_from(add.sizing.word(), add.value)
        .map_err(|problem| CliError::Usage(format!("--value {problem}")))?;
    if add.value > VALUE_MAX {
        return Err(CliError::Usage(format!(
            "--value must be at most {VALUE_MAX}, got {}",
            add.value
        )));
    }
    let master = directory::account_id(db, &add.master).await?;
    let follower = directory::account_id(db, &add.follower).await?;
    if master == follower {
        return Err(CliError::Usage(format!("link from {} to itself", add.master)));
    }
    let accounts = directory::list_accounts(db).await?;
    if accounts.iter().any(|account| account.id == follower && account.platform == "external") {
        return Err(CliError::Usage(format!(
            "follower {:?}: an external account only publishes; no node can trade on it",
            add.follower
        )));
    }
    Ok(NewLink {
        master,
        follower,
        magic: add.magic,
        sizing,
        below_min: match add.below_min {
            BelowMinWord::Skip => BelowMin::Skip,
            BelowMinWord::UseMin => BelowMin::UseMin,
        },
        above_max: match add.above_max {
            AboveMaxWord::Clamp => AboveMax::Clamp,
            AboveMaxWord::Skip => AboveMax::Skip,
        },
        align_contract: add.align_contract,
        slippage_points: add.slippage_points,
        copy_stops: !add.no_stops,
        copy_pendings: !add.no_pendings,
        reverse: add.reverse,
        sync_existing: add.sync_existing,
        symbol_map: add.symbols.into_iter().collect::<BTreeMap<_, _>>(),
        symbol_suffix: add.symbol_suffix,
    })
}

#[allow(clippy::print_stdout, reason = "a verb answers on stdout")]
async fn switch(db: &mut sqlx::PgConnection, link: LinkId, enabled: bool) -> Result<(), CliError> {
    let changed = directory::enable_link(db, link, enabled).await?;
    let word = if enabled { "enabled" } else { "disabled" };
    println!("link {link} {}{word}", if changed { "" } else { "was already " });
    Ok(())
}
