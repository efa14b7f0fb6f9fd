//! Damages of JSON that leave it JSON: what a parser of fields, and the code behind it, has to stand.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};
use serde_json::{Value, json};

/// Most damages of one input.
const MOST: usize = 5;
/// Strings at which parsers of amounts, names and paths go wrong.
const STRINGS: [&str; 22] = [
    "",
    " ",
    "0",
    "-1",
    "-0",
    "1e999",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551616",
    "8E",
    "1Ki1",
    "0.0000000001",
    "100n",
    "NaN",
    "٣",
    "é\u{0301}",
    "\0",
    "../../etc/passwd",
    "<img src=x onerror=alert(1)>",
    "a=b,c;d\n",
    "true",
    "{\"gpu\":{}}",
];

/// One damage of a value in the tree.
#[derive(Clone, Debug)]
enum Damage {
    Replace(Value),
    Remove,
    /// The key of a value gets another case, or a suffix.
    Rename(bool),
    /// A copy of another value of the tree.
    Copy(Index),
    Wrap,
    Long(usize),
}

/// Seeds, each damaged up to five times.
pub fn damaged_json(seeds: Vec<Value>) -> impl Strategy<Value = Value> {
    (select(seeds), vec((any::<Index>(), damage()), 0..=MOST)).prop_map(|(mut value, damages)| {
        for (at, damage) in damages {
            let pointers = pointers(&value);
            damage.apply(&mut value, &pointers, at);
        }
        value
    })
}

fn damage() -> impl Strategy<Value = Damage> {
    let numbers = vec![
        json!(0),
        json!(-1),
        json!(1),
        json!(i64::MIN),
        json!(i64::MAX),
        json!(u64::MAX),
        json!(0.5),
        json!(1e308),
    ];
    let others = vec![
        Value::Null,
        json!(true),
        json!([]),
        json!({}),
        json!([null]),
        json!({"": null}),
    ];
    prop_oneof![
        4 => select(&STRINGS[..]).prop_map(|text| Damage::Replace(json!(text))),
        3 => select(numbers).prop_map(Damage::Replace),
        3 => select(others).prop_map(Damage::Replace),
        2 => Just(Damage::Remove),
        1 => any::<bool>().prop_map(Damage::Rename),
        3 => any::<Index>().prop_map(Damage::Copy),
        1 => Just(Damage::Wrap),
        1 => select(vec![100_usize, 300, 70_000]).prop_map(Damage::Long),
    ]
}

impl Damage {
    fn apply(self, tree: &mut Value, pointers: &[String], at: Index) {
        let Some(pointer) = pointers.get(at.index(pointers.len().max(1))) else {
            return;
        };
        if let Self::Remove | Self::Rename(_) = self {
            self.change_key(tree, pointer);
            return;
        }
        let copied = if let Self::Copy(from) = &self {
            let from = pointers.get(from.index(pointers.len().max(1)));
            from.and_then(|from| tree.pointer(from)).cloned()
        } else {
            None
        };
        let Some(place) = tree.pointer_mut(pointer) else {
            return;
        };
        let old = place.take();
        *place = match self {
            Self::Replace(value) => value,
            Self::Copy(_) => copied.unwrap_or_default(),
            Self::Wrap => json!([old]),
            Self::Long(length) => match old {
                Value::String(text) => json!(text.repeat(length / text.len().max(1) + 1)),
                Value::Array(items) => {
                    let n_items = items.len() * length.min(300);
                    Value::Array(items.into_iter().cycle().take(n_items).collect())
                }
                // As deep as parsers are asked to go, and deeper.
                other => (0..length.min(300)).fold(other, |inner, _| json!([inner])),
            },
            Self::Remove | Self::Rename(_) => old,
        };
    }

    /// Removes a value from the object or array around it, or gives it another key.
    fn change_key(self, tree: &mut Value, pointer: &str) {
        let Some((parent, key)) = pointer.rsplit_once('/') else {
            return;
        };
        let key = key.replace("~1", "/").replace("~0", "~");
        match tree.pointer_mut(parent) {
            Some(Value::Object(fields)) => {
                let value = fields.remove(&key).unwrap_or_default();
                match self {
                    Self::Rename(true) => fields.insert(key.to_uppercase(), value),
                    Self::Rename(false) => fields.insert(format!("{key}s"), value),
                    _ => None,
                };
            }
            Some(Value::Array(items)) => {
                if let Some(at) = key.parse::<usize>().ok().filter(|at| *at < items.len()) {
                    items.remove(at);
                }
            }
            _ => {}
        }
    }
}

/// The JSON pointers of every value of a tree.
fn pointers(tree: &Value) -> Vec<String> {
    let mut found = Vec::new();
    let mut open = vec![(String::new(), tree)];
    while let Some((pointer, value)) = open.pop() {
        match value {
            Value::Object(fields) => {
                for (key, value) in fields {
                    let key = key.replace('~', "~0").replace('/', "~1");
                    open.push((format!("{pointer}/{key}"), value));
                }
            }
            Value::Array(items) => {
                // Of long arrays the first values are like the others.
                for (at, value) in items.iter().take(20).enumerate() {
                    open.push((format!("{pointer}/{at}"), value));
                }
            }
            _ => {}
        }
        found.push(pointer);
    }
    found
}
