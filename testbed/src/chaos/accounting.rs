//! Compares the amounts that the scheduler counts for each GPU with the sums of the pods' records.

use std::collections::BTreeMap;

use serde::Deserialize;

use kit::http_client::HttpClient;
use kit::invariants::HeldAmounts;

/// The part of the scheduler's answer to `inspect` that is compared.
#[derive(Debug, Deserialize)]
struct InspectReply {
    nodes: Vec<NodeAmounts>,
}

#[derive(Debug, Deserialize)]
struct NodeAmounts {
    name: String,
    devs: Vec<AccountedGpu>,
    #[serde(default)]
    problems: Vec<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct AccountedGpu {
    id: i32,
    used_bytes: u64,
    used_core: u64,
}

/// Returns a sentence for each GPU whose amounts in the scheduler differ from the sums of the records.
pub(super) async fn differences(client: &HttpClient, scheduler: &str, accounts: &HeldAmounts) -> Vec<String> {
    let url = format!("{scheduler}/gpushare-scheduler/inspect");
    let answer = match client.get(&url).await {
        Ok((_, body)) => serde_json::from_slice::<InspectReply>(&body).map_err(|error| error.to_string()),
        Err(error) => Err(error.to_string()),
    };
    match answer {
        Ok(inspected) => compare(inspected.nodes, accounts),
        Err(error) => vec![format!("cannot read the scheduler's amounts: {error}")],
    }
}

/// Lists the GPUs for which the scheduler reports other bytes and percent than the records of the pods add up to, and the
/// problems that it reports of nodes.
fn compare(nodes: Vec<NodeAmounts>, accounts: &HeldAmounts) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    let mut by_gpu = BTreeMap::new();
    for node in nodes {
        for problem in &node.problems {
            found.push(format!("the scheduler says of {}: {problem}", node.name));
        }
        for gpu in node.devs {
            by_gpu.insert((node.name.clone(), gpu.id), (gpu.used_bytes, gpu.used_core));
        }
    }
    for (key, gpu) in &accounts.gpus {
        let (recorded, reported) = ((gpu.used(), gpu.core), by_gpu.get(key).copied());
        if reported != Some(recorded) {
            found.push(format!(
                "GPU {} of {}: records add up to {recorded:?}, the scheduler holds {reported:?}",
                gpu.minor, gpu.node
            ));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use kit::invariants::GpuUse;

    #[test]
    fn accounting_of_scheduler_and_plugin_must_agree_on_every_gpu() {
        let gpu = |minor| {
            let mut gpu = GpuUse::default();
            (gpu.node, gpu.minor) = ("n1".to_owned(), minor);
            gpu
        };
        let mut accounts = HeldAmounts::default();
        accounts
            .gpus
            .extend([(("n1".to_owned(), 0), gpu(0)), (("n1".to_owned(), 1), gpu(1))]);
        let nodes = |text: &str| serde_json::from_str::<InspectReply>(text).unwrap().nodes;
        let alike = r#"{"nodes": [{"name": "n1", "devs": [{"id": 0, "usedBytes": 0, "usedCore": 0}, {"id": 1, "usedBytes": 0, "usedCore": 0}]}]}"#;
        assert_eq!(compare(nodes(alike), &accounts), Vec::<String>::new());
        let unlike = r#"{"nodes": [{"name": "n1", "problems": ["odd"], "devs": [{"id": 0, "usedBytes": 7, "usedCore": 0}]}]}"#;
        assert_eq!(compare(nodes(unlike), &accounts).len(), 3);
    }
}
