//! `lockstep link`: add, list, switch on and off.

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
    /// Copy again, from now on.
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
    #[arg(long, default_value = "1")]
    value: Decimal,
    /// The number that marks this link's orders at the follower's broker; default: a free one.
    #[arg(long)]
    magic: Option<Magic>,
    /// Below the smallest volume: `skip` or `use-min`.
    #[arg(long, value_enum, default_value = "skip")]
    below_min: BelowMinWord,
    /// Above the largest volume: `clamp` or `skip`.
    #[arg(long, value_enum, default_value = "clamp")]
    above_max: AboveMaxWord,
    /// How far, in points, the price may have moved for a copy that comes late.
    #[arg(long, default_value_t = 20)]
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
    #[arg(long, default_value = "")]
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
                let new = new_link(&mut db, *add).await?;
                let id = directory::add_link(&mut db, &new).await?;
                println!("link {id} added");
            }
            LinkVerb::List { json } => print_rows(&directory::list_links(&mut db).await?, json)?,
            LinkVerb::Enable { link } => switch(&mut db, link, true).await?,
            LinkVerb::Disable { link } => switch(&mut db, link, false).await?,
        }
        Ok(())
    })?
}

async fn new_link(db: &mut sqlx::PgConnection, add: AddArgs) -> Result<NewLink, CliError> {
    let sizing = directory::sizing_from(add.sizing.word(), add.value)
        .map_err(|problem| CliError::Usage(format!("--value {problem}")))?;
    Ok(NewLink {
        master: directory::account_id(db, &add.master).await?,
        follower: directory::account_id(db, &add.follower).await?,
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
