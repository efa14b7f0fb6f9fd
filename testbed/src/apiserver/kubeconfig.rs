//! The kubeconfig file that leads ordinary clients here.

use serde_json::{Value, json};

/// The file's text.
pub(crate) fn render(url: &str, user: &str, token: Option<&str>) -> String {
    let credentials = token.map_or_else(|| json!({}), |token| json!({"token": token}));
    let config: Value = json!({
        "apiVersion": "v1", "kind": "Config", "preferences": {}, "current-context": "testbed",
        "clusters": [{"name": "testbed", "cluster": {"server": url}}],
        "contexts": [{"name": "testbed", "context": {"cluster": "testbed", "user": user, "namespace": "default"}}],
        "users": [{"name": user, "user": credentials}],
    });
    // JSON is YAML, and every client reads it.
    format!("{config:#}\n")
}
