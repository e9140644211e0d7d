//! Reads a query as far as a lint needs it: which metrics, labels and ranges it names.
//!
//! In: the text of a query with Grafana's variables. Out: [`Expr`], or why it was not understood.
//! Not covered: whether it means something; a real Prometheus decides that.

use std::collections::BTreeSet;

/// Functions and operators that the dashboards use; another one is added here on purpose.
const FUNCTIONS: &[&str] = &["sum", "max", "min", "rate", "increase", "histogram_quantile", "time"];

/// What a query names.
#[derive(Debug, Default)]
pub(super) struct Expr {
    pub(super) metrics: BTreeSet<String>,
    pub(super) labels: BTreeSet<String>,
    /// What matchers compare labels with.
    pub(super) values: BTreeSet<(String, String)>,
    pub(super) grouped_by: BTreeSet<String>,
    pub(super) range_texts: BTreeSet<String>,
    pub(super) ranges: usize,
}

impl Expr {
    pub(super) fn read(text: &str) -> Result<Expr, String> {
        let mut expr = Expr::default();
        let mut rest = text;
        let mut groups = false;
        while let Some(next) = rest.chars().next() {
            match next {
                '{' => rest = expr.matchers(rest)?,
                '[' => {
                    let end = rest.find(']').ok_or("[ without ]")?;
                    expr.range_texts.insert(rest[1..end].to_owned());
                    expr.ranges += 1;
                    rest = &rest[end + 1..];
                }
                '(' if groups => {
                    let end = rest.find(')').ok_or("( without )")?;
                    let labels = rest[1..end].split(',').map(|label| label.trim().to_owned());
                    expr.grouped_by.extend(labels.clone());
                    expr.labels.extend(labels);
                    groups = false;
                    rest = &rest[end + 1..];
                }
                'a'..='z' => {
                    let end = rest.find(|c: char| !is_word(c)).unwrap_or(rest.len());
                    let word = &rest[..end];
                    rest = &rest[end..];
                    match word {
                        "by" => groups = true,
                        _ if FUNCTIONS.contains(&word) => {}
                        _ => {
                            expr.metrics.insert(word.to_owned());
                        }
                    }
                }
                '(' | ')' | ',' | ' ' | '-' | '/' | '.' | '0'..='9' => rest = &rest[1..],
                other => return Err(format!("{other:?} was not expected")),
            }
        }
        Ok(expr)
    }

    fn matchers<'a>(&mut self, text: &'a str) -> Result<&'a str, String> {
        let end = text.find('}').ok_or("{ without }")?;
        for matcher in text[1..end].split(',') {
            let (label, value) =
                matcher.split_once('=').ok_or_else(|| format!("{matcher}: no ="))?;
            let label = label.trim().trim_end_matches('!');
            self.labels.insert(label.to_owned());
            let value = value.trim_start_matches('~');
            let inner = value.strip_prefix('"').and_then(|value| value.strip_suffix('"'));
            let inner = inner.ok_or_else(|| format!("{matcher}: no quotes"))?;
            self.values.insert((label.to_owned(), inner.to_owned()));
        }
        Ok(&text[end + 1..])
    }
}

fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_' || c == ':'
}

/// The labels that a legend prints.
pub(super) fn placeholders(legend: &str) -> Vec<&str> {
    legend.split("{{").skip(1).filter_map(|part| part.split("}}").next()).map(str::trim).collect()
}

/// The query as Grafana sends it with all nodes chosen; the window holds the whole test.
pub(super) fn with_variables(text: &str) -> String {
    let text =
        text.replace("$__rate_interval", "5m").replace("$__range", "10m").replace("$node", ".*");
    assert!(!text.contains('$'), "{text}: a variable without a value");
    text
}

#[test]
fn a_query_with_groups_matchers_and_a_range_is_read_whole() {
    let expr = Expr::read(
        "histogram_quantile(0.5, sum by (le, kind) (rate(a_bucket{x!=\"1\", y=~\"$n\"}[5m]))) - b",
    )
    .unwrap();
    let words = |set: &BTreeSet<String>| set.iter().cloned().collect::<Vec<_>>().join(" ");
    assert_eq!(words(&expr.metrics), "a_bucket b");
    assert_eq!(words(&expr.labels), "kind le x y");
    assert_eq!(words(&expr.grouped_by), "kind le");
    let value = |label: &str, value: &str| (label.to_owned(), value.to_owned());
    assert_eq!(expr.values, [value("x", "1"), value("y", "$n")].into());
    assert_eq!((expr.ranges, words(&expr.range_texts)), (1, "5m".to_owned()));
    assert!(Expr::read("sum(a{b=1})").is_err() && Expr::read("a[5m").is_err());
}
