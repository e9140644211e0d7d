//! Lines in, requests out; answers and pushes in, lines out.
//!
//! Decides what a malformed line is answered with. Pure.
//!
//! Invariants:
//! 1. A refusal names the field by its path in the line, and the value that was there.
//! 2. An `id` that could be read comes back even if the rest of the line is wrong.

use crate::protocol::{FieldError, Instruction, Op, OrderMeta, Push, Request};
use bytes::Bytes;
use schemas::{AccountId, Magic, OrderRequest};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Map, Value};
use serde_path_to_error::Segment;

/// A request line that cannot be carried out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BadLine {
    pub(crate) id: Option<u64>,
    pub(crate) error: FieldError,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OrderHead {
    account: AccountId,
    meta: OrderMeta,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ManualHead {
    account: AccountId,
}

/// Reads one request line.
pub(crate) fn decode_request(line: &[u8]) -> Result<(u64, Request), BadLine> {
    let nameless = |error| BadLine { id: None, error };
    let value: Value = serde_json::from_slice(line).map_err(|e| {
        let text = String::from_utf8_lossy(line);
        nameless(FieldError::new("line", text, format!("must be one JSON object: {e}")))
    })?;
    let Value::Object(mut map) = value else {
        return Err(nameless(FieldError::new("line", value, "must be one JSON object")));
    };
    let id = match map.remove("id") {
        Some(id) => id.as_u64().ok_or_else(|| {
            nameless(FieldError::new("id", id, "must be a whole number, 0 or more"))
        })?,
        None => return Err(nameless(FieldError::new("id", "", "is missing"))),
    };
    decode_body(map).map(|request| (id, request)).map_err(|error| BadLine { id: Some(id), error })
}

fn decode_body(mut map: Map<String, Value>) -> Result<Request, FieldError> {
    match take_op(&mut map, "op")?.as_str() {
        "order" => {
            let instruction = take_instruction(&mut map)?;
            require_magic(&instruction)?;
            let head: OrderHead = decode_value(&Value::Object(map), "")?;
            Ok(Request::Order { account: head.account, meta: head.meta, instruction })
        }
        "manual" => {
            let instruction = take_instruction(&mut map)?;
            let head: ManualHead = decode_value(&Value::Object(map), "")?;
            Ok(Request::Manual { account: head.account, instruction })
        }
        op => decode_value::<Op>(&wrap(op, map), "").map(Request::Other).map_err(name_op(op)),
    }
}

fn take_op(map: &mut Map<String, Value>, field: &str) -> Result<String, FieldError> {
    match map.remove("op") {
        Some(Value::String(op)) => Ok(op),
        Some(other) => Err(FieldError::new(field, other, "must be text")),
        None => Err(FieldError::new(field, "", "is missing")),
    }
}

fn take_instruction(map: &mut Map<String, Value>) -> Result<Instruction, FieldError> {
    let mut inner = match map.remove("request") {
        Some(Value::Object(inner)) => inner,
        Some(other) => return Err(FieldError::new("request", other, "must be an object")),
        None => return Err(FieldError::new("request", "", "is missing")),
    };
    let op = take_op(&mut inner, "request.op")?;
    decode_value(&wrap(&op, inner), "request").map_err(name_op(&op))
}

/// A node's order carries a magic; 0 is a person.
fn require_magic(instruction: &Instruction) -> Result<(), FieldError> {
    let (Instruction::Open { magic, .. } | Instruction::Place { magic, .. }) = instruction else {
        return Ok(());
    };
    Magic::from_i64(*magic)
        .map(drop)
        .map_err(|e| FieldError::new("request.magic", magic, e.to_string()))
}

fn wrap(op: &str, map: Map<String, Value>) -> Value {
    Value::Object(Map::from_iter([(op.to_owned(), Value::Object(map))]))
}

fn name_op(op: &str) -> impl FnOnce(FieldError) -> FieldError {
    let op = op.to_owned();
    move |error| {
        if !error.text.starts_with("unknown variant") {
            return error;
        }
        let field = if error.field.is_empty() {
            "op".to_owned()
        } else if error.field.contains('.') || error.field != "request" {
            return error;
        } else {
            "request.op".to_owned()
        };
        FieldError::new(field, op, error.text)
    }
}

/// Decodes with an error that names the path below `prefix` and the value found there.
fn decode_value<T: DeserializeOwned>(value: &Value, prefix: &str) -> Result<T, FieldError> {
    serde_path_to_error::deserialize(value).map_err(|error| {
        let mut path = prefix.to_owned();
        let mut at = Some(value);
        for segment in error.path() {
            match segment {
                Segment::Seq { index } => {
                    path.push_str(&format!("[{index}]"));
                    at = at.and_then(|v| v.get(*index));
                }
                Segment::Map { key } => {
                    push_key(&mut path, key);
                    at = at.and_then(|v| v.get(key));
                }
                Segment::Enum { variant } => at = at.and_then(|v| v.get(variant)),
                Segment::Unknown => {}
            }
        }
        let text = error.inner().to_string();
        if let Some(name) = quoted_after(&text, "missing field `") {
            push_key(&mut path, name);
            return FieldError::new(path, "", "is missing");
        }
        if let Some(name) = quoted_after(&text, "unknown field `")
            && path.rsplit('.').next() != Some(name)
        {
            at = at.and_then(|v| v.get(name));
            push_key(&mut path, name);
        }
        FieldError::new(path, at.map(Value::to_string).unwrap_or_default(), text)
    })
}

fn push_key(path: &mut String, key: &str) {
    if !path.is_empty() {
        path.push('.');
    }
    path.push_str(key);
}

fn quoted_after<'a>(text: &'a str, start: &str) -> Option<&'a str> {
    text.strip_prefix(start)?.split('`').next()
}

#[derive(Serialize)]
struct AnswerLine<'a, T> {
    id: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ok: Option<&'a T>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'a FieldError>,
}

#[derive(Serialize)]
struct PushLine<'a> {
    push: &'a Push,
}

#[derive(Serialize)]
struct OrderLine<'a> {
    id: u64,
    op: &'static str,
    account: AccountId,
    meta: &'a OrderMeta,
    request: &'a OrderRequest,
}

fn line_of(value: &impl Serialize) -> Bytes {
    let mut line = Vec::new();
    put_line(&mut line, value);
    line.into()
}

fn put_line(lines: &mut Vec<u8>, value: &impl Serialize) {
    serde_json::to_writer(&mut *lines, value).expect("our own types have text keys and no floats");
    lines.push(b'\n');
}

pub(crate) fn encode_ok<T: Serialize>(id: u64, reply: &T) -> Bytes {
    line_of(&AnswerLine { id: Some(id), ok: Some(reply), error: None })
}

pub(crate) fn encode_error(id: Option<u64>, error: &FieldError) -> Bytes {
    line_of(&AnswerLine::<()> { id, ok: None, error: Some(error) })
}

pub(crate) fn encode_push(push: &Push) -> Bytes {
    line_of(&PushLine { push })
}

pub(crate) fn encode_order(
    lines: &mut Vec<u8>,
    id: u64,
    account: AccountId,
    meta: &OrderMeta,
    request: &OrderRequest,
) {
    put_line(lines, &OrderLine { id, op: "order", account, meta, request });
}

/// Writes a request other than an order. Requests by hand go through here as well.
pub(crate) fn encode_request(id: u64, request: &Request) -> Bytes {
    let flat = |value: Value| match value {
        Value::Object(outer) => outer.into_iter().next().and_then(|(op, inner)| match inner {
            Value::Object(inner) => Some((op, inner)),
            _ => None,
        }),
        _ => None,
    };
    let to_flat = |value: Result<Value, serde_json::Error>| {
        value.ok().and_then(flat).expect("our own requests are enums of objects")
    };
    let with_op = |(op, mut map): (String, Map<String, Value>)| {
        map.insert("op".to_owned(), op.into());
        map
    };
    let mut map = match request {
        Request::Other(op) => with_op(to_flat(serde_json::to_value(op))),
        Request::Manual { account, instruction } | Request::Order { account, instruction, .. } => {
            let inner = with_op(to_flat(serde_json::to_value(instruction)));
            let mut map = Map::new();
            let op = if let Request::Order { meta, .. } = request {
                let meta = serde_json::to_value(meta).expect("our own types have text keys");
                map.insert("meta".to_owned(), meta);
                "order"
            } else {
                "manual"
            };
            map.insert("op".to_owned(), op.into());
            map.insert("account".to_owned(), account.get().into());
            map.insert("request".to_owned(), inner.into());
            map
        }
    };
    map.insert("id".to_owned(), id.into());
    line_of(&map)
}

/// A line from the broker, its content not yet decoded.
#[derive(Debug, Deserialize)]
pub(crate) struct Incoming {
    #[serde(default)]
    pub(crate) id: Option<u64>,
    #[serde(default)]
    pub(crate) ok: Option<Box<RawValue>>,
    #[serde(default)]
    pub(crate) error: Option<FieldError>,
    #[serde(default)]
    pub(crate) push: Option<Push>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(line: &str) -> (Option<u64>, String, String) {
        let bad = decode_request(line.as_bytes()).unwrap_err();
        (bad.id, bad.error.field, bad.error.value)
    }

    fn named(id: u64, field: &str, value: &str) -> (Option<u64>, String, String) {
        (Some(id), field.to_owned(), value.to_owned())
    }

    #[test]
    fn a_refused_line_names_the_field_and_the_value() {
        let order = |request: &str| {
            format!(
                r#"{{"id":4,"op":"order","account":1,"meta":{{"node":"n","token":1,"deadline_margin_us":5,"sent_at_us":7}},"request":{request}}}"#
            )
        };
        let cases = [
            (r#"{"id":1}"#.to_owned(), named(1, "op", "")),
            (r#"{"id":1,"op":7}"#.to_owned(), named(1, "op", "7")),
            (r#"{"id":1,"op":"dance"}"#.to_owned(), named(1, "op", "dance")),
            (r#"{"id":1,"op":"snapshot","account":0}"#.to_owned(), named(1, "account", "0")),
            (r#"{"id":1,"op":"snapshot"}"#.to_owned(), named(1, "account", "")),
            (r#"{"id":1,"op":"ping","x":"y"}"#.to_owned(), named(1, "x", r#""y""#)),
            (
                r#"{"id":1,"op":"feed","quotes":[{"symbol":"A","bid":"1","ask":"2"},{"symbol":"A","bid":"NaN","ask":"2"}]}"#.to_owned(),
                named(1, "quotes[1].bid", r#""NaN""#),
            ),
            (order(r#"{"op":"jump"}"#), named(4, "request.op", "jump")),
            (order(r#"{"op":"close"}"#), named(4, "request.ticket", "")),
            (order(r#"{"op":"close","ticket":5,"lots":"-1"}"#), named(4, "request.lots", r#""-1""#)),
            (order(r#"{"op":"close","ticket":5,"lots":1.5}"#), named(4, "request.lots", "1.5")),
            (
                order(r#"{"op":"open","symbol":"A","side":"buy","lots":"1","stop_loss":"x","take_profit":null,"magic":3,"comment":""}"#),
                named(4, "request.stop_loss", r#""x""#),
            ),
            (
                order(r#"{"op":"open","symbol":"A","side":"up","lots":"1","magic":3}"#),
                named(4, "request.side", r#""up""#),
            ),
            (
                order(r#"{"op":"open","symbol":"A","side":"buy","lots":"1","magic":0}"#),
                named(4, "request.magic", "0"),
            ),
        ];
        for (line, expected) in cases {
            assert_eq!(refusal(&line), expected, "{line}");
        }
    }

    #[test]
    fn a_line_that_is_not_json_is_refused_without_an_id() {
        for (line, field) in [("hello", "line"), ("[1]", "line"), (r#"{"op":"ping"}"#, "id")] {
            let (id, got, _) = refusal(line);
            assert_eq!((id, got.as_str()), (None, field), "{line}");
        }
    }

    #[test]
    fn a_missing_meta_field_is_named_with_its_path() {
        let line = r#"{"id":4,"op":"order","account":1,"meta":{"node":"n","token":1,"sent_at_us":7},"request":{"op":"cancel","ticket":1}}"#;
        assert_eq!(refusal(line), named(4, "meta.deadline_margin_us", ""));
    }

    #[test]
    fn what_a_client_writes_is_what_the_broker_reads() {
        let instruction = Instruction::open_by_hand(
            "EURUSD".parse().unwrap(),
            schemas::Side::Buy,
            "0.1".parse().unwrap(),
        );
        let account = AccountId::new(9).unwrap();
        for request in [
            Request::Manual { account, instruction },
            Request::Other(Op::Ping {}),
            Request::Other(Op::Settings { answer_delay_ms: Some(5), check_tokens: None }),
            Request::Other(Op::Accounts { after: Some(account) }),
        ] {
            let line = encode_request(7, &request);
            assert_eq!(decode_request(&line), Ok((7, request)));
        }
    }

    #[test]
    fn an_order_of_a_client_is_read_as_the_same_instruction() {
        let meta: OrderMeta = serde_json::from_str(
            r#"{"node":"n","token":1,"deadline_margin_us":5,"sent_at_us":7,"client_ref":2}"#,
        )
        .unwrap();
        let request = OrderRequest::Open {
            symbol: "EURUSD".parse().unwrap(),
            side: schemas::Side::Sell,
            lots: "0.1".parse().unwrap(),
            stop_loss: None,
            take_profit: Some("1.05".parse().unwrap()),
            magic: Magic::new(12).unwrap(),
            comment: "tag".to_owned(),
        };
        let account = AccountId::new(9).unwrap();
        let mut line = Vec::new();
        encode_order(&mut line, 3, account, &meta, &request);
        let expected = Request::Order { account, meta, instruction: request.into() };
        assert_eq!(decode_request(&line), Ok((3, expected)));
    }
}
