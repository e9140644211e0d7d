//! What accounts hold: trades and pending orders, as masters publish them and as brokers list them.

use crate::ids::{FollowerTicket, MasterTicket, Micros, Symbol};
use crate::quantity::{Lots, Money, Price};
use rust_decimal::Decimal;
use serde::{Deserialize, Serialize};

/// Direction of a trade.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Side {
    /// Long.
    Buy,
    /// Short.
    Sell,
}

impl Side {
    /// The other direction.
    pub fn opposite(self) -> Side {
        match self {
            Side::Buy => Side::Sell,
            Side::Sell => Side::Buy,
        }
    }

    /// The word on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Side::Buy => "buy",
            Side::Sell => "sell",
        }
    }
}

/// Kind of a pending order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PendingKind {
    /// Buy below the market.
    BuyLimit,
    /// Sell above the market.
    SellLimit,
    /// Buy above the market.
    BuyStop,
    /// Sell below the market.
    SellStop,
}

impl PendingKind {
    /// Direction of the trade that it becomes.
    pub fn side(self) -> Side {
        match self {
            PendingKind::BuyLimit | PendingKind::BuyStop => Side::Buy,
            PendingKind::SellLimit | PendingKind::SellStop => Side::Sell,
        }
    }

    /// The word on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            PendingKind::BuyLimit => "buy_limit",
            PendingKind::SellLimit => "sell_limit",
            PendingKind::BuyStop => "buy_stop",
            PendingKind::SellStop => "sell_stop",
        }
    }
}

/// One open trade of a master, as events and snapshots carry it.
///
/// Units: lots of the master's symbol; prices in the quote currency; times in microseconds UTC.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MasterPosition {
    /// Logical id, kept by the adapter when the broker renumbers.
    pub ticket: MasterTicket,
    /// Symbol as the master's broker prints it.
    pub symbol: Symbol,
    /// Direction; a reversal is a close and a new ticket.
    pub side: Side,
    /// Volume now.
    pub lots: Lots,
    /// Volume when the trade was opened: what targets are computed from.
    pub lots_at_open: Lots,
    /// Price at which it was opened; absent if the source does not know it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub open_price: Option<Price>,
    /// Stop loss.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop_loss: Option<Price>,
    /// Take profit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub take_profit: Option<Price>,
    /// When it was opened.
    #[serde(rename = "opened_at_us")]
    pub opened_at: Micros,
    /// Units of the underlying in one lot, if the master's platform says it.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "decimal_text")]
    pub contract_size: Option<Decimal>,
    /// This trade is itself a copy made by Lockstep; it is not copied on.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_copy: bool,
}

/// One pending order of a master.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MasterPending {
    /// Logical id; the trade it becomes keeps it.
    pub ticket: MasterTicket,
    /// Symbol as the master's broker prints it.
    pub symbol: Symbol,
    /// Limit or stop, and direction.
    pub kind: PendingKind,
    /// Volume asked for.
    pub lots: Lots,
    /// Price at which it triggers.
    pub price: Price,
    /// Stop loss of the trade it becomes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop_loss: Option<Price>,
    /// Take profit of the trade it becomes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub take_profit: Option<Price>,
    /// When it was placed.
    #[serde(rename = "placed_at_us")]
    pub placed_at: Micros,
    /// Units of the underlying in one lot, if the master's platform says it.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "decimal_text")]
    pub contract_size: Option<Decimal>,
    /// This order is itself a copy made by Lockstep; it is not copied on.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_copy: bool,
}

/// Money of an account at an instant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Funds {
    /// Balance in the account's currency.
    pub balance: Money,
    /// Equity in the account's currency.
    pub equity: Money,
    /// Margin that the open trades take, where the platform says it: 0 exactly when none is open.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub margin_used: Option<Money>,
    /// Currency code, as the broker prints it.
    pub currency: Symbol,
    /// When the broker said so.
    #[serde(rename = "at_us")]
    pub at: Micros,
}

/// One open trade as a broker lists it. Comment and magic are the broker's words and not trusted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BrokerPosition {
    /// The broker's number for it now.
    pub ticket: FollowerTicket,
    /// Symbol as the broker prints it.
    pub symbol: Symbol,
    /// Direction.
    pub side: Side,
    /// Volume now.
    pub lots: Lots,
    /// Price at which it was opened.
    pub open_price: Price,
    /// Stop loss.
    #[serde(default)]
    pub stop_loss: Option<Price>,
    /// Take profit.
    #[serde(default)]
    pub take_profit: Option<Price>,
    /// When it was opened, by the broker's clock brought to UTC.
    #[serde(rename = "opened_at_us")]
    pub opened_at: Micros,
    /// Magic number as the broker returns it; 0 where none was set.
    #[serde(default)]
    pub magic: i64,
    /// Comment as the broker returns it.
    #[serde(default)]
    pub comment: String,
}

/// One pending order as a broker lists it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BrokerPending {
    /// The broker's number for it; the trade it becomes has the same number.
    pub ticket: FollowerTicket,
    /// Symbol as the broker prints it.
    pub symbol: Symbol,
    /// Limit or stop, and direction.
    pub kind: PendingKind,
    /// Volume asked for.
    pub lots: Lots,
    /// Price at which it triggers.
    pub price: Price,
    /// Stop loss of the trade it becomes.
    #[serde(default)]
    pub stop_loss: Option<Price>,
    /// Take profit of the trade it becomes.
    #[serde(default)]
    pub take_profit: Option<Price>,
    /// When it was placed.
    #[serde(rename = "placed_at_us")]
    pub placed_at: Micros,
    /// Magic number as the broker returns it; 0 where none was set.
    #[serde(default)]
    pub magic: i64,
    /// Comment as the broker returns it.
    #[serde(default)]
    pub comment: String,
}

/// One finished trade, or the finished part of one, from a broker's history.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClosedTrade {
    /// The number it had when this part was closed.
    pub ticket: FollowerTicket,
    /// Symbol as the broker prints it.
    pub symbol: Symbol,
    /// Direction it had.
    pub side: Side,
    /// Volume closed here.
    pub lots: Lots,
    /// Price at which it was opened.
    pub open_price: Price,
    /// Price at which this part was closed.
    pub close_price: Price,
    /// When it was opened.
    #[serde(rename = "opened_at_us")]
    pub opened_at: Micros,
    /// When this part was closed.
    #[serde(rename = "closed_at_us")]
    pub closed_at: Micros,
    /// Magic number as the broker returns it; 0 where none was set.
    #[serde(default)]
    pub magic: i64,
    /// Comment as the broker returns it; MT4 writes `to #n` here on a partial close.
    #[serde(default)]
    pub comment: String,
    /// Volume of the same trade that stays open after this part; absent when it ended.
    #[serde(default)]
    pub lots_left: Option<Lots>,
}

/// What a broker says of a symbol.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SymbolSpec {
    /// Symbol as the broker prints it.
    pub symbol: Symbol,
    /// Digits after the point of a price; one point is the last of them.
    pub digits: u32,
    /// Smallest change of volume.
    pub lots_step: Lots,
    /// Smallest volume.
    pub lots_min: Lots,
    /// Largest volume of one order.
    pub lots_max: Lots,
    /// Units of the underlying in one lot, if known.
    #[serde(default, with = "decimal_text")]
    pub contract_size: Option<Decimal>,
    /// Smallest distance of stops from the market, in points.
    #[serde(default)]
    pub stops_level_points: u32,
}

impl SymbolSpec {
    /// The size of one point: 10^-digits.
    pub fn point(&self) -> Decimal {
        Decimal::new(1, self.digits)
    }
}

/// The two prices of a symbol at an instant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quote {
    /// Symbol as the broker prints it.
    pub symbol: Symbol,
    /// What a seller gets.
    pub bid: Price,
    /// What a buyer pays.
    pub ask: Price,
    /// When it was quoted.
    #[serde(rename = "at_us")]
    pub at: Micros,
}

/// An optional decimal as text, above zero.
pub mod decimal_text {
    use crate::quantity::QuantityError;
    use rust_decimal::Decimal;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    /// Writes the canonical text or nil.
    pub fn serialize<S: Serializer>(value: &Option<Decimal>, s: S) -> Result<S::Ok, S::Error> {
        match value {
            Some(value) => s.collect_str(&value.normalize()),
            None => s.serialize_none(),
        }
    }

    /// Reads the text; refuses what is not above zero.
    pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Decimal>, D::Error> {
        let Some(text) = Option::<String>::deserialize(d)? else { return Ok(None) };
        let value = Decimal::from_str_exact(&text).map_err(|_| {
            D::Error::custom(QuantityError::NotDecimal {
                kind: "decimal",
                value: crate::ids::shorten(&text),
            })
        })?;
        if value <= Decimal::ZERO {
            return Err(D::Error::custom(QuantityError::OutOfRange {
                kind: "decimal",
                range: "above 0",
                value,
            }));
        }
        Ok(Some(value))
    }
}
