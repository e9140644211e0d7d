//! `lockstep paper ctl`: changes a paper broker that runs.
//!
//! Decides whether the words given make one fault; what a fault does is decided at the broker.

use super::account::host_and_port;
use super::paper::drive;
use super::table::{TableRow, or_dash, print_rows};
use super::{CliError, block_on};
use clap::{Args, Subcommand, ValueEnum};
use paper::faults::{
    Fault, FaultKind, FaultSpec, ORDER_WORDS, SHARE_WHOLE, Settings, SettingsChange, Span, Withheld,
};
use paper::{PaperDriver, PaperError};
use rust_decimal::Decimal;
use schemas::{AccountId, FollowerTicket, RejectClass};
use serde::Serialize;
use std::time::Duration;

/// Arguments of `lockstep paper ctl`.
#[derive(Debug, Args)]
pub struct CtlArgs {
    /// HOST:PORT of the paper broker.
    #[arg(value_parser = host_and_port)]
    address: String,
    /// Print JSON.
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    verb: CtlVerb,
}

#[derive(Debug, Subcommand)]
enum CtlVerb {
    /// Set, list and clear faults.
    #[command(subcommand)]
    Fault(FaultVerb),
    /// End every session of an account.
    Kick {
        /// Number of the account at the broker.
        account: AccountId,
    },
    /// Show what holds for every order, and change it.
    Settings {
        /// Time from carrying an order out to answering it, such as 130ms or 2s.
        #[arg(long, value_name = "TIME", value_parser = duration)]
        answer_delay: Option<Duration>,
        /// Refuse orders whose lease token is older than the highest one seen.
        #[arg(long, value_name = "true|false")]
        check_tokens: Option<bool>,
    },
    /// Close trades for want of margin: now, or whenever equity is below a level.
    StopOut {
        /// Number of the account at the broker.
        account: AccountId,
        #[command(flatten)]
        how: StopOutHow,
    },
}

#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
struct StopOutHow {
    /// Close the trade with the largest loss now, whatever the margin says.
    #[arg(long)]
    now: bool,
    /// Set the level: equity in percent of the margin in use.
    #[arg(long, value_name = "PERCENT")]
    level: Option<u32>,
    /// Take the level away.
    #[arg(long)]
    no_level: bool,
}

#[derive(Debug, Subcommand)]
enum FaultVerb {
    /// Set one more fault.
    Set(Box<SetArgs>),
    /// List the faults that are set.
    List,
    /// Take faults away: all, one, or those of an account.
    Clear {
        /// Number of the fault.
        fault: Option<u64>,
        /// Number of the account at the broker.
        #[arg(long)]
        account: Option<AccountId>,
    },
}

#[derive(Debug, Args)]
struct SetArgs {
    /// What happens.
    #[arg(long, value_enum)]
    kind: Kind,
    /// Only this account; default: all.
    #[arg(long)]
    account: Option<AccountId>,
    /// Only these orders; default: all.
    #[arg(long, value_name = "ORDER,...", value_delimiter = ',', value_parser = ORDER_WORDS)]
    orders: Vec<String>,
    /// Only this share of them, above 0 and at most 1.
    #[arg(long, default_value = "1", value_parser = share, allow_negative_numbers = true)]
    share: u32,
    /// Only so many.
    #[arg(long)]
    count: Option<u32>,
    /// Only so long, such as 20s.
    #[arg(long = "for", value_name = "TIME", value_parser = duration)]
    lasts: Option<Duration>,
    /// How long, such as 5s, or between two times, such as 500ms-8s: for delays and unsynced.
    #[arg(long, value_name = "TIME[-TIME]", value_parser = span)]
    delay: Option<Span>,
    /// What is filled, 1 to 99: for partial_fill.
    #[arg(long)]
    percent: Option<u32>,
    /// Class of the refusal: for reject.
    #[arg(long, value_parser = reject_class)]
    class: Option<RejectClass>,
    /// Characters that stay: for comment_cut.
    #[arg(long)]
    chars: Option<u32>,
    /// What is put in front: for comment_prefix.
    #[arg(long)]
    text: Option<String>,
    /// What the lists lack: for unsynced.
    #[arg(long, value_enum)]
    lists: Option<Lists>,
    /// The broker says that its empty lists are complete: for unsynced.
    #[arg(long)]
    claims_complete: bool,
    /// Lost if the connection ends before it arrives: for delivery_delay.
    #[arg(long)]
    dies_with_connection: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
enum Kind {
    /// Refused with another price.
    Requote,
    /// Refused with a class.
    Reject,
    /// Refused because the market is closed.
    MarketClosed,
    /// Opened or closed in part.
    PartialFill,
    /// Carried out, never answered.
    LostAnswer,
    /// Never arrives, never answered.
    LostRequest,
    /// Arrives late, and what is sent after it as well.
    DeliveryDelay,
    /// Arrives at once, is carried out late.
    AcceptanceDelay,
    /// Carried out at once, answered late.
    AnswerDelay,
    /// The comment is cut.
    CommentCut,
    /// The comment is emptied.
    CommentBlank,
    /// The comment gets a text in front.
    CommentPrefix,
    /// Lists are not complete for a while after a login.
    Unsynced,
    /// A login ends every earlier session of the account.
    SecondSessionKicks,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Lists {
    /// Everything.
    All,
    /// Every second entry.
    Half,
}

fn duration(text: &str) -> Result<Duration, String> {
    let wrong = || format!("must be a whole number with ms, s or m, such as 20s, got {text:?}");
    let end = text.find(|c: char| !c.is_ascii_digit()).ok_or_else(wrong)?;
    let number: u64 = text[..end].parse().map_err(|_| wrong())?;
    let unit_ms = match &text[end..] {
        "ms" => 1,
        "s" => 1_000,
        "m" => 60_000,
        _ => return Err(wrong()),
    };
    number.checked_mul(unit_ms).map(Duration::from_millis).ok_or_else(wrong)
}

fn span(text: &str) -> Result<Span, String> {
    let (min, max) = text.split_once('-').unwrap_or((text, text));
    let ms = |part| duration(part).map(|time| Span::of(time).min_ms);
    Ok(Span { min_ms: ms(min)?, max_ms: ms(max)? })
}

/// A share in thousandths.
fn share(text: &str) -> Result<u32, String> {
    let wrong = || format!("must be above 0 and at most 1, in thousandths, got {text:?}");
    let share: Decimal = text.parse().map_err(|_| wrong())?;
    let permille = share.checked_mul(Decimal::from(SHARE_WHOLE)).ok_or_else(wrong)?;
    let is_right = permille > Decimal::ZERO && permille.is_integer();
    let permille = u32::try_from(permille).map_err(|_| wrong())?;
    if is_right && permille <= SHARE_WHOLE { Ok(permille) } else { Err(wrong()) }
}

fn reject_class(text: &str) -> Result<RejectClass, String> {
    serde_json::from_value(text.into()).map_err(|error| error.to_string())
}

impl SetArgs {
    fn spec(&self) -> Result<FaultSpec, CliError> {
        self.refuse_surplus()?;
        let ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        Ok(FaultSpec {
            account: self.account,
            orders: self.orders.iter().cloned().collect(),
            kind: self.fault_kind()?,
            share_permille: self.share,
            count: self.count,
            for_ms: self.lasts.map(ms),
        })
    }

    fn fault_kind(&self) -> Result<FaultKind, CliError> {
        Ok(match self.kind {
            Kind::Requote => FaultKind::Requote {},
            Kind::Reject => FaultKind::Reject { class: self.need("class", self.class)? },
            Kind::MarketClosed => FaultKind::MarketClosed {},
            Kind::PartialFill => {
                FaultKind::PartialFill { percent: self.need("percent", self.percent)? }
            }
            Kind::LostAnswer => FaultKind::LostAnswer {},
            Kind::LostRequest => FaultKind::LostRequest {},
            Kind::DeliveryDelay => {
                let dies_with_connection = self.dies_with_connection;
                FaultKind::DeliveryDelay { span: self.delay()?, dies_with_connection }
            }
            Kind::AcceptanceDelay => FaultKind::AcceptanceDelay { span: self.delay()? },
            Kind::AnswerDelay => FaultKind::AnswerDelay { span: self.delay()? },
            Kind::CommentCut => FaultKind::CommentCut { chars: self.need("chars", self.chars)? },
            Kind::CommentBlank => FaultKind::CommentBlank {},
            Kind::CommentPrefix => {
                FaultKind::CommentPrefix { text: self.need("text", self.text.clone())? }
            }
            Kind::Unsynced => FaultKind::Unsynced {
                lists: match self.need("lists", self.lists)? {
                    Lists::All => Withheld::All,
                    Lists::Half => Withheld::Half,
                },
                span: self.delay()?,
                claims_complete: self.claims_complete,
            },
            Kind::SecondSessionKicks => FaultKind::SecondSessionKicks {},
        })
    }

    fn delay(&self) -> Result<Span, CliError> {
        self.need("delay", self.delay)
    }

    fn need<T>(&self, option: &str, value: Option<T>) -> Result<T, CliError> {
        let kind = self.kind_word();
        value.ok_or_else(|| CliError::Usage(format!("--kind {kind} needs --{option}")))
    }

    fn kind_word(&self) -> String {
        let value = self.kind.to_possible_value().expect("no kind is hidden");
        value.get_name().to_owned()
    }

    /// An option that this kind does not have would be a wish that nobody fulfils.
    fn refuse_surplus(&self) -> Result<(), CliError> {
        use Kind::{AcceptanceDelay, AnswerDelay, DeliveryDelay, Unsynced};
        let delayed = [DeliveryDelay, AcceptanceDelay, AnswerDelay, Unsynced];
        let given: [(&str, bool, &[Kind]); 8] = [
            ("delay", self.delay.is_some(), &delayed),
            ("percent", self.percent.is_some(), &[Kind::PartialFill]),
            ("class", self.class.is_some(), &[Kind::Reject]),
            ("chars", self.chars.is_some(), &[Kind::CommentCut]),
            ("text", self.text.is_some(), &[Kind::CommentPrefix]),
            ("lists", self.lists.is_some(), &[Unsynced]),
            ("claims-complete", self.claims_complete, &[Unsynced]),
            ("dies-with-connection", self.dies_with_connection, &[DeliveryDelay]),
        ];
        match given.iter().find(|(_, given, kinds)| *given && !kinds.contains(&self.kind)) {
            None => Ok(()),
            Some((option, ..)) => {
                let kind = self.kind_word();
                Err(CliError::Usage(format!("--{option} means nothing for --kind {kind}")))
            }
        }
    }
}

#[derive(Debug, Serialize)]
#[serde(transparent)]
struct FaultRow(Fault);

impl TableRow for FaultRow {
    const HEAD: &'static [&'static str] =
        &["id", "account", "orders", "kind", "detail", "share", "left", "ends in", "hits"];
    fn cells(&self) -> Vec<String> {
        let Fault { id, spec, left_ms, hits, .. } = &self.0;
        let orders: Vec<&str> = spec.orders.iter().map(String::as_str).collect();
        let share = Decimal::from(spec.share_permille) / Decimal::from(SHARE_WHOLE);
        let left = spec.count.map(|count| u64::from(count).saturating_sub(*hits));
        vec![
            id.to_string(),
            spec.account.map_or_else(|| "all".to_owned(), |account| account.to_string()),
            if orders.is_empty() { "all".to_owned() } else { orders.join(",") },
            spec.kind.as_str().to_owned(),
            detail(&spec.kind),
            share.normalize().to_string(),
            or_dash(left),
            or_dash(left_ms.map(|ms| format!("{:.1} s", Duration::from_millis(ms).as_secs_f64()))),
            hits.to_string(),
        ]
    }
}

fn detail(kind: &FaultKind) -> String {
    let time = |span: &Span| match (span.min_ms, span.max_ms) {
        (min, max) if min == max => format!("{min} ms"),
        (min, max) => format!("{min}-{max} ms"),
    };
    match kind {
        FaultKind::Reject { class } => class.as_str().to_owned(),
        FaultKind::PartialFill { percent } => format!("{percent} %"),
        FaultKind::DeliveryDelay { span, dies_with_connection: true } => {
            format!("{}, dies with its connection", time(span))
        }
        FaultKind::DeliveryDelay { span, .. }
        | FaultKind::AcceptanceDelay { span }
        | FaultKind::AnswerDelay { span } => time(span),
        FaultKind::CommentCut { chars } => format!("{chars} characters"),
        FaultKind::CommentPrefix { text } => text.clone(),
        FaultKind::Unsynced { lists, span, claims_complete } => {
            let lack = if *lists == Withheld::All { "all" } else { "half" };
            let claim = if *claims_complete { ", claims to be complete" } else { "" };
            format!("lacks {lack} for {}{claim}", time(span))
        }
        FaultKind::Requote {}
        | FaultKind::MarketClosed {}
        | FaultKind::LostAnswer {}
        | FaultKind::LostRequest {}
        | FaultKind::CommentBlank {}
        | FaultKind::SecondSessionKicks {} => "-".to_owned(),
    }
}

#[derive(Debug, Serialize)]
#[serde(transparent)]
struct SettingsRow(Settings);

impl TableRow for SettingsRow {
    const HEAD: &'static [&'static str] = &["answer delay", "checks tokens"];
    fn cells(&self) -> Vec<String> {
        let is_checked = if self.0.check_tokens { "yes" } else { "no" };
        vec![format!("{} ms", self.0.answer_delay_ms), is_checked.to_owned()]
    }
}

#[derive(Debug, Serialize)]
struct KickRow {
    account: AccountId,
    sessions_ended: usize,
}

impl TableRow for KickRow {
    const HEAD: &'static [&'static str] = &["account", "sessions ended"];
    fn cells(&self) -> Vec<String> {
        vec![self.account.to_string(), self.sessions_ended.to_string()]
    }
}

#[derive(Debug, Serialize)]
struct StopOutRow {
    account: AccountId,
    /// Absent: there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    level_percent: Option<u32>,
    /// The trade that was closed now.
    #[serde(skip_serializing_if = "Option::is_none")]
    closed: Option<FollowerTicket>,
}

impl TableRow for StopOutRow {
    const HEAD: &'static [&'static str] = &["account", "new level", "closed"];
    fn cells(&self) -> Vec<String> {
        let level = self.level_percent.map(|percent| format!("{percent} %"));
        vec![self.account.to_string(), or_dash(level), or_dash(self.closed)]
    }
}

/// Runs `lockstep paper ctl`.
pub fn run(args: CtlArgs) -> Result<(), CliError> {
    if let CtlVerb::Fault(FaultVerb::Set(set)) = &args.verb {
        // Wrong words are told whether or not a broker is there.
        set.spec()?;
    }
    block_on(async {
        let driver = drive(&args.address, "paper-ctl").await?;
        let json = args.json;
        match args.verb {
            CtlVerb::Fault(verb) => {
                let faults = fault(&driver, verb).await?;
                let rows: Vec<FaultRow> = faults.into_iter().map(FaultRow).collect();
                print_rows(&rows, json)?;
            }
            CtlVerb::Kick { account } => {
                let sessions_ended = driver.kick(account).await.map_err(failed)?;
                print_rows(&[KickRow { account, sessions_ended }], json)?;
            }
            CtlVerb::Settings { answer_delay, check_tokens } => {
                let answer_delay_ms = answer_delay.map(|time| Span::of(time).min_ms);
                let change = SettingsChange { answer_delay_ms, check_tokens };
                let settings = driver.settings(change).await.map_err(failed)?;
                print_rows(&[SettingsRow(settings)], json)?;
            }
            CtlVerb::StopOut { account, how } => {
                print_rows(&[stop_out(&driver, account, &how).await?], json)?;
            }
        }
        Ok(())
    })?
}

async fn fault(driver: &PaperDriver, verb: FaultVerb) -> Result<Vec<Fault>, CliError> {
    match verb {
        FaultVerb::Set(set) => {
            driver.set_fault(set.spec()?).await.map(|fault| vec![fault]).map_err(failed)
        }
        FaultVerb::List => driver.faults().await.map_err(failed),
        FaultVerb::Clear { fault, account } => {
            driver.clear_faults(fault, account).await.map_err(failed)
        }
    }
}

async fn stop_out(
    driver: &PaperDriver,
    account: AccountId,
    how: &StopOutHow,
) -> Result<StopOutRow, CliError> {
    let level_percent = how.level;
    let closed = if how.now {
        Some(driver.stop_out(account).await.map_err(failed)?)
    } else {
        driver.set_stop_out(account, level_percent).await.map_err(failed)?;
        None
    };
    Ok(StopOutRow { account, level_percent, closed })
}

/// A refusal is about the words given; anything else is about the broker.
fn failed(error: PaperError) -> CliError {
    match error {
        PaperError::Refused(refusal) => CliError::Usage(refusal.to_string()),
        other => CliError::missing("paper broker", other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Program {
        #[command(flatten)]
        ctl: CtlArgs,
    }

    /// The fault that these words ask for, or what is wrong with them.
    fn fault_of(words: &str) -> Result<FaultSpec, String> {
        let start = ["ctl", "127.0.0.1:1", "fault", "set", "--kind"];
        let arguments = start.into_iter().chain(words.split_whitespace());
        let program = Program::try_parse_from(arguments).map_err(|error| error.to_string())?;
        match program.ctl.verb {
            CtlVerb::Fault(FaultVerb::Set(set)) => set.spec().map_err(|error| error.to_string()),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn words_become_the_fault_they_say() {
        let account = AccountId::new(5).unwrap();
        let requote = FaultSpec {
            for_ms: Some(20_000),
            ..FaultSpec::new(FaultKind::Requote {}).account(account).share_permille(300).count(3)
        };
        let words = "requote --account 5 --share 0.3 --for 20s --count 3";
        assert_eq!(fault_of(words), Ok(requote));
        let span = Span { min_ms: 500, max_ms: 8_000 };
        let delay = FaultKind::DeliveryDelay { span, dies_with_connection: true };
        let delay = FaultSpec::new(delay).orders(&["open", "close"]);
        let words = "delivery_delay --orders open,close --delay 500ms-8s --dies-with-connection";
        assert_eq!(fault_of(words), Ok(delay));
        let reject = FaultKind::Reject { class: RejectClass::NoMoney };
        assert_eq!(fault_of("reject --class no_money"), Ok(FaultSpec::new(reject)));
        let (lists, span) = (Withheld::All, Span { min_ms: 8_000, max_ms: 8_000 });
        let unsynced = FaultKind::Unsynced { lists, span, claims_complete: true };
        let words = "unsynced --lists all --delay 8s --claims-complete";
        assert_eq!(fault_of(words), Ok(FaultSpec::new(unsynced)));
    }

    #[test]
    fn an_address_that_cannot_be_one_is_named_before_anything_is_tried() {
        for wrong in ["nonsense", "127.0.0.1", "127.0.0.1:0", ":7", "host:99999"] {
            let error = Program::try_parse_from(["ctl", wrong, "kick", "5"]).unwrap_err();
            let text = error.to_string();
            assert!(text.contains("HOST:PORT") && text.contains(wrong), "{text}");
        }
    }

    #[test]
    fn words_that_make_no_fault_are_named() {
        for (words, mentions) in [
            ("requot", vec!["requot", "requote"]),
            ("reject", vec!["reject", "--class"]),
            ("reject --class nonsense", vec!["--class", "nonsense", "no_money"]),
            ("delivery_delay", vec!["delivery_delay", "--delay"]),
            ("delivery_delay --delay 8", vec!["--delay", "\"8\""]),
            ("requote --percent 5", vec!["--percent", "requote"]),
            ("acceptance_delay --delay 1s --dies-with-connection", vec!["--dies-with-connection"]),
            ("requote --orders jump", vec!["jump", "modify_pending"]),
            ("requote --share 1.5", vec!["--share", "1.5"]),
            ("requote --account 0", vec!["--account", "0"]),
        ] {
            let error = fault_of(words).unwrap_err();
            assert!(mentions.iter().all(|word| error.contains(word)), "{words}: {error}");
        }
    }

    #[test]
    fn times_shares_and_spans_are_read_with_their_units() {
        assert_eq!(duration("20s"), Ok(Duration::from_secs(20)));
        assert_eq!(duration("5m"), Ok(Duration::from_secs(300)));
        assert_eq!(span("500ms-8s"), Ok(Span { min_ms: 500, max_ms: 8_000 }));
        assert_eq!(span("130ms"), Ok(Span { min_ms: 130, max_ms: 130 }));
        assert_eq!((share("0.3"), share("1"), share("0.001")), (Ok(300), Ok(1_000), Ok(1)));
        for wrong in ["", "20", "s", "-5s", "1.5s", "20h", "99999999999999999999s"] {
            assert!(duration(wrong).unwrap_err().contains(&format!("{wrong:?}")), "{wrong}");
        }
        for wrong in ["0", "-0.1", "1.001", "0.0005", "x", "79228162514264337593543950335"] {
            assert!(share(wrong).unwrap_err().contains(&format!("{wrong:?}")), "{wrong}");
        }
        assert!(span("5s-x").is_err());
    }
}
