//! The fields that come with a request, read into a type, and what is wrong with them in plain words.
//!
//! In: names with texts of a query, or with values of a JSON object. Out: the type; or the one field at
//! fault, what it must be and what was given.
//!
//! Invariants:
//! 1. A fault names its field. Where a value is wrong it tells that value, cut off after
//!    [`SHOWN_MAX`] characters.
//! 2. A field that nobody knows, or that is there twice, is a fault.
//!
//! Not covered: fields that are lists or objects; there are none.

use serde::Deserialize;
use serde::de::value::MapAccessDeserializer;
use serde::de::{
    self, DeserializeOwned, DeserializeSeed, Deserializer, IntoDeserializer, MapAccess, Visitor,
};
use serde_json::Value;
use std::fmt;

/// So many characters of what was given are told again.
const SHOWN_MAX: usize = 60;

/// What a field holds.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Given {
    /// The text behind the equals sign.
    Query(String),
    /// A value of JSON.
    Json(Value),
}

impl Given {
    fn text(self) -> Result<String, Fault> {
        match self {
            Given::Query(text) | Given::Json(Value::String(text)) => Ok(text),
            Given::Json(other) => Err(Fault::value("must be a text", cut_off(&other.to_string()))),
        }
    }

    fn number(self) -> Result<u64, Fault> {
        let (number, shown) = match &self {
            Given::Query(text) => (text.parse().ok(), shown(text)),
            Given::Json(value) => (value.as_u64(), cut_off(&value.to_string())),
        };
        number.ok_or_else(|| Fault::value("must be a whole number", shown))
    }
}

/// What was given, as a fault tells it.
pub(super) fn shown(text: &str) -> String {
    format!("{:?}", cut_off(text))
}

fn cut_off(text: &str) -> String {
    match text.char_indices().nth(SHOWN_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// One of these words, for people: `must be one of a, b`.
pub(super) fn one_of(words: &[&str]) -> String {
    format!("must be one of {}", words.join(", "))
}

/// Why fields are none of the type.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Fault {
    /// The value of the field that is being read.
    #[error("{0}")]
    Value(String),
    /// A field, whatever its value.
    #[error("{field}: {problem}")]
    Field {
        /// Its name.
        field: String,
        /// What is wrong with it.
        problem: String,
    },
}

impl Fault {
    fn value(must: &str, shown: String) -> Self {
        Fault::Value(format!("{must}, got {shown}"))
    }

    fn field(field: &str, problem: impl Into<String>) -> Self {
        Fault::Field { field: cut_off(field), problem: problem.into() }
    }

    fn of(self, field: &str) -> Self {
        match self {
            Fault::Value(problem) => Fault::field(field, problem),
            Fault::Field { .. } => self,
        }
    }
}

impl de::Error for Fault {
    fn custom<T: fmt::Display>(problem: T) -> Self {
        Fault::Value(problem.to_string())
    }

    fn unknown_variant(word: &str, words: &'static [&'static str]) -> Self {
        Fault::value(&one_of(words), shown(word))
    }

    fn unknown_field(field: &str, fields: &'static [&'static str]) -> Self {
        match fields {
            [] => Fault::field(field, "there is no such field, and no other one here"),
            [only] => Fault::field(field, format!("there is no such field, only {only}")),
            all => {
                Fault::field(field, format!("there is no such field; there are {}", all.join(", ")))
            }
        }
    }

    fn missing_field(field: &'static str) -> Self {
        Fault::field(field, "is missing")
    }

    fn duplicate_field(field: &'static str) -> Self {
        Fault::field(field, "is there twice")
    }
}

/// Reads fields, in their order.
pub(super) fn read<T: DeserializeOwned>(fields: Vec<(String, Given)>) -> Result<T, Fault> {
    let fields = Fields { rest: fields.into_iter(), under_way: None };
    T::deserialize(MapAccessDeserializer::new(fields))
}

struct Fields {
    rest: std::vec::IntoIter<(String, Given)>,
    under_way: Option<(String, Given)>,
}

impl<'de> MapAccess<'de> for Fields {
    type Error = Fault;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, Fault> {
        self.under_way = self.rest.next();
        let Some((name, _)) = &self.under_way else { return Ok(None) };
        seed.deserialize(name.as_str().into_deserializer()).map(Some)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, Fault> {
        let (name, given) = self.under_way.take().expect("a value is asked for after its name");
        seed.deserialize(given).map_err(|fault| fault.of(&name))
    }
}

impl<'de> Deserializer<'de> for Given {
    type Error = Fault;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        visitor.visit_string(self.text()?)
    }

    fn deserialize_u64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        visitor.visit_u64(self.number()?)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        visitor.visit_some(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Fault> {
        visitor.visit_enum(self.text()?.into_deserializer())
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u128 f32 f64 char str string bytes byte_buf unit
        unit_struct newtype_struct seq tuple tuple_struct map struct identifier ignored_any
    }
}

/// The fields of a JSON object, in their order, those that are there twice included.
#[derive(Debug)]
pub(super) struct Object(pub(super) Vec<(String, Given)>);

impl<'de> Deserialize<'de> for Object {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Reader;
        impl<'de> Visitor<'de> for Reader {
            type Value = Object;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Object, A::Error> {
                let mut fields = Vec::new();
                while let Some((name, value)) = map.next_entry()? {
                    fields.push((name, Given::Json(value)));
                }
                Ok(Object(fields))
            }
        }
        from.deserialize_map(Reader)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use schemas::LinkId;
    use serde_json::json;

    #[derive(Debug, Deserialize)]
    #[serde(rename_all = "snake_case")]
    enum Colour {
        DarkRed,
        Green,
    }

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Wanted {
        link: Option<LinkId>,
        colour: Colour,
        text: Option<String>,
    }

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Nothing {}

    fn query(fields: &[(&str, &str)]) -> Vec<(String, Given)> {
        let given =
            |(name, text): &(&str, &str)| ((*name).to_owned(), Given::Query((*text).to_owned()));
        fields.iter().map(given).collect()
    }

    fn fault_of(fields: Vec<(String, Given)>) -> String {
        read::<Wanted>(fields).unwrap_err().to_string()
    }

    #[test]
    fn fields_of_a_query_and_of_an_object_are_read_alike() {
        let wanted: Wanted =
            read(query(&[("link", "7"), ("text", "7"), ("colour", "dark_red")])).unwrap();
        assert!(matches!(wanted.colour, Colour::DarkRed));
        assert_eq!((wanted.link.map(LinkId::get), wanted.text.as_deref()), (Some(7), Some("7")));
        let Object(fields) =
            serde_json::from_value(json!({ "link": 7, "colour": "green" })).unwrap();
        let wanted: Wanted = read(fields).unwrap();
        assert!(matches!(wanted.colour, Colour::Green));
        assert_eq!((wanted.link.map(LinkId::get), wanted.text), (Some(7), None));
    }

    #[test]
    fn a_fault_names_the_field_and_the_value_and_what_it_must_be() {
        let long = "9".repeat(100);
        let shortened = format!("link: must be a whole number, got \"{}…\"", "9".repeat(SHOWN_MAX));
        for (fields, told) in [
            (&[("link", "abc")], "link: must be a whole number, got \"abc\""),
            (&[("link", "")], "link: must be a whole number, got \"\""),
            (&[("link", "-1")], "link: must be a whole number, got \"-1\""),
            (&[("link", "0")], "link: link must be between 1 and 9223372036854775807, got 0"),
            (&[("link", long.as_str())], shortened.as_str()),
            (&[("colour", "red")], "colour: must be one of dark_red, green, got \"red\""),
            (&[("lnk", "1")], "lnk: there is no such field; there are link, colour, text"),
            (&[("text", "a")], "colour: is missing"),
        ] {
            assert_eq!(fault_of(query(fields)), told);
        }
        assert_eq!(fault_of(query(&[("link", "1"), ("link", "2")])), "link: is there twice");
        let nothing = read::<Nothing>(query(&[("x", "1")])).unwrap_err().to_string();
        assert_eq!(nothing, "x: there is no such field, and no other one here");
        for (body, told) in [
            (r#"{"colour": 3}"#, "colour: must be a text, got 3"),
            (r#"{"colour": null}"#, "colour: must be a text, got null"),
            (r#"{"colour": "red"}"#, "colour: must be one of dark_red, green, got \"red\""),
            (r#"{"link": "1"}"#, "link: must be a whole number, got \"1\""),
            (r#"{"colour": "green", "colour": "green"}"#, "colour: is there twice"),
        ] {
            let Object(fields) = serde_json::from_str(body).unwrap();
            assert_eq!(fault_of(fields), told);
        }
    }
}
