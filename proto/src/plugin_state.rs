//! Whether a node's device plugin serves kubelet: an annotation of the Node, written by the plugin of that node.
//!
//! The plugin writes it when kubelet has opened all of its device lists, when it has lost one, and before it ends. A plugin that
//! is killed writes nothing, so the annotation alone does not say that the plugin lives.

use std::collections::BTreeMap;

use k8s_openapi::jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// The annotation: a JSON object.
pub const PLUGIN_STATE: &str = "gpushare/device-plugin";

/// Longest annotation that is read, in bytes.
const MAX_BYTES: usize = 512;

/// The state of a node's device plugin, as the plugin reports it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PluginState {
    /// True if kubelet has the plugin's device lists, so that pods can be admitted.
    pub serving: bool,
    /// The time of the report, by the clock of the node.
    #[serde(with = "text")]
    pub since: Timestamp,
    /// UID of the plugin's pod; none of a plugin that runs in no pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
}

/// The annotation cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("annotation {PLUGIN_STATE} {0}")]
pub struct PluginStateError(String);

/// Reads the annotations of a Node; `None` if its plugin has never reported.
///
/// # Errors
/// The annotation is no such JSON object, or is too long.
pub fn read(annotations: Option<&BTreeMap<String, String>>) -> Result<Option<PluginState>, PluginStateError> {
    let Some(text) = annotations.and_then(|annotations| annotations.get(PLUGIN_STATE)) else {
        return Ok(None);
    };
    if text.len() > MAX_BYTES {
        return Err(PluginStateError(format!("is longer than {MAX_BYTES} bytes")));
    }
    serde_json::from_str(text)
        .map(Some)
        .map_err(|cause| PluginStateError(format!("does not parse: {cause}")))
}

impl PluginState {
    /// The merge patch of the Node that writes the annotation.
    pub fn patch(&self) -> Value {
        let text = serde_json::to_string(self).unwrap_or_default();
        json!({"metadata": {"annotations": {PLUGIN_STATE: text}}})
    }
}

/// A time in the form of RFC 3339.
mod text {
    use k8s_openapi::jiff::Timestamp;
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(time: &Timestamp, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(time)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Timestamp, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse()
            .map_err(|error| D::Error::custom(format!("{text:?} is no time: {error}")))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    fn annotated(text: &str) -> BTreeMap<String, String> {
        [(PLUGIN_STATE.to_owned(), text.to_owned())].into()
    }

    #[test]
    fn the_form_of_the_annotation() {
        let since = "2026-11-23T05:44:19.123456Z".parse().unwrap();
        let state = PluginState {
            serving: true,
            since,
            pod: Some("u".to_owned()),
        };
        let text = r#"{"serving":true,"since":"2026-11-23T05:44:19.123456Z","pod":"u"}"#;
        assert_eq!(state.patch()["metadata"]["annotations"][PLUGIN_STATE], text);
        assert_eq!(read(Some(&annotated(text))), Ok(Some(state)));
        assert_eq!(read(None), Ok(None));
    }

    #[rstest]
    #[case::no_object("[]")]
    #[case::no_time(r#"{"serving":true,"since":"today"}"#)]
    #[case::cut_short(r#"{"serving":true"#)]
    fn bad_ones_are_refused(#[case] text: &str) {
        assert!(
            read(Some(&annotated(text)))
                .unwrap_err()
                .to_string()
                .contains("does not parse")
        );
        let long = text.repeat(MAX_BYTES);
        assert!(
            read(Some(&annotated(&long)))
                .unwrap_err()
                .to_string()
                .contains("longer")
        );
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in ".{0,80}") {
            let _ = read(Some(&annotated(&text)));
        }
    }
}
