//! The keys of JSON objects in annotations: matched with the fields of a Rust type without regard to case, as Go's
//! `encoding/json` matches them.
//!
//! serde hands the field names of every `Deserialize` type to the deserializer, so that one deserializer serves all annotations.

use serde::Deserializer;
use serde::de::value::{MapDeserializer, SeqDeserializer};
use serde::de::{DeserializeOwned, Error as _, IntoDeserializer, Unexpected, Visitor};
use serde_json::{Error, Map, Value};

use crate::excerpt::excerpt;

/// The treatment of keys of a JSON object for which its Rust type has no field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UnknownKeys {
    /// The object is refused: the author of a new pod meant something by the key.
    Refuse,
    /// The key is ignored: the devices of a placed pod were chosen without it, and tables of other programs may have more fields.
    Skip,
}

/// Reads a JSON value; ignores keys for which its types have no field.
pub(crate) fn read_value<T: DeserializeOwned>(value: Value) -> Result<T, Error> {
    read(value, UnknownKeys::Skip)
}

fn read<T: DeserializeOwned>(value: Value, unknown: UnknownKeys) -> Result<T, Error> {
    let path = String::new();
    T::deserialize(Keyed { value, path, unknown })
}

/// The field of a JSON object by its name, in any case.
pub(crate) fn field<'a>(object: &'a Value, name: &str) -> Option<&'a Value> {
    let mut fields = object.as_object()?.iter();
    let (_, value) = fields.find(|(key, _)| key.eq_ignore_ascii_case(name))?;
    Some(value)
}

pub(crate) fn parse_object<T: DeserializeOwned>(text: &str, unknown: UnknownKeys) -> Result<T, String> {
    let value: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
    if !value.is_object() {
        return Err("not a JSON object".to_owned());
    }
    read(value, unknown).map_err(|error| error.to_string())
}

/// A JSON value, whose objects' keys become the field names of their types.
struct Keyed {
    value: Value,
    /// The keys that lead to the value, each with a dot behind it; empty for the whole annotation.
    path: String,
    unknown: UnknownKeys,
}

impl Keyed {
    fn child(&self, key: &str, value: Value) -> Self {
        Self {
            value,
            path: format!("{}{key}.", self.path),
            unknown: self.unknown,
        }
    }

    fn error(path: &str, error: Error) -> Error {
        match path.trim_end_matches('.') {
            "" => error,
            path => Error::custom(format!("{}: {error}", excerpt(path))),
        }
    }

    /// The values of a JSON object under the names of a type's fields; treats other keys as `unknown` says.
    fn fields(&self, object: Map<String, Value>, names: &[&str]) -> Result<Vec<(String, Self)>, Error> {
        let mut fields = Vec::with_capacity(object.len());
        for (key, value) in object {
            let known = names.iter().find(|name| name.eq_ignore_ascii_case(&key));
            let name = match (known, self.unknown) {
                (Some(name), _) => (*name).to_owned(),
                (None, UnknownKeys::Skip) => continue,
                (None, UnknownKeys::Refuse) => return Err(Error::custom(self.unknown_key(&key, names))),
            };
            let child = self.child(&name, value);
            fields.push((name, child));
        }
        Ok(fields)
    }

    fn unknown_key(&self, key: &str, names: &[&str]) -> String {
        let path = &self.path;
        let shown = excerpt(&format!("{path}{key}"));
        match nearest(key, names) {
            Some(name) => {
                format!("unknown key {shown:?} (case does not matter); did you mean \"{path}{name}\"?")
            }
            None => format!("unknown key {shown:?}; known are {}", names.join(", ")),
        }
    }
}

impl<'de> Deserializer<'de> for Keyed {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(mut self, visitor: V) -> Result<V::Value, Error> {
        match self.value.take() {
            Value::Object(object) => {
                let mut children = Vec::with_capacity(object.len());
                for (key, value) in object {
                    let child = self.child(&key, value);
                    children.push((key, child));
                }
                visitor.visit_map(MapDeserializer::new(children.into_iter()))
            }
            Value::Array(list) => {
                let parent = self.path.trim_end_matches('.');
                let mut children = Vec::with_capacity(list.len());
                for (at, value) in list.into_iter().enumerate() {
                    children.push(Self {
                        value,
                        path: format!("{parent}[{at}]."),
                        unknown: self.unknown,
                    });
                }
                visitor.visit_seq(SeqDeserializer::new(children.into_iter()))
            }
            other => {
                let read = other.deserialize_any(visitor);
                read.map_err(|error| Self::error(&self.path, error))
            }
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        if self.value.is_null() {
            visitor.visit_none()
        } else {
            visitor.visit_some(self)
        }
    }

    fn deserialize_struct<V: Visitor<'de>>(
        mut self,
        name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        match self.value.take() {
            Value::Object(object) => {
                let children = self.fields(object, fields)?;
                visitor.visit_map(MapDeserializer::new(children.into_iter()))
            }
            // serde alone would accept a list of the fields' values too.
            Value::Array(_) => {
                let error = Error::invalid_type(Unexpected::Seq, &visitor);
                Err(Self::error(&self.path, error))
            }
            other => {
                let read = other.deserialize_struct(name, fields, visitor);
                read.map_err(|error| Self::error(&self.path, error))
            }
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        visitor: V,
    ) -> Result<V::Value, Error> {
        visitor.visit_newtype_struct(self)
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct seq tuple
        tuple_struct map enum identifier ignored_any
    }
}

impl IntoDeserializer<'_, Error> for Keyed {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

/// The name that was probably meant by a key; `None` if none is near.
pub(crate) fn nearest<'a>(key: &str, names: &[&'a str]) -> Option<&'a str> {
    let distances = names.iter().map(|name| (edits(key, name), *name));
    let (distance, name) = distances.min()?;
    // Texts that differ in more than a third of the letters have little in common.
    (distance <= name.len() / 3).then_some(name)
}

/// The Levenshtein distance of two texts, without regard to case.
fn edits(one: &str, other: &str) -> usize {
    let other = other.to_ascii_lowercase();
    // The distances of the letters of `one` so far from every beginning of `other`.
    let mut row: Vec<usize> = (0..=other.chars().count()).collect();
    for (i, letter) in one.to_ascii_lowercase().chars().enumerate() {
        let (mut diagonal, mut left) = (i, i + 1);
        let mut next = vec![left];
        for (above, other) in row.iter().skip(1).zip(other.chars()) {
            left = (left.min(*above) + 1).min(diagonal + usize::from(letter != other));
            diagonal = *above;
            next.push(left);
        }
        row = next;
    }
    row.last().copied().unwrap_or_default()
}
