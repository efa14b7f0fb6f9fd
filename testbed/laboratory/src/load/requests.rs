//! The requests of kube-scheduler to an extender: pods of several shapes, and names in the order in which it samples nodes.
//!
//! kube-scheduler keeps its nodes in a list that it goes through round and round. Since 1.35 a watch fills it by way of a
//! hash map (client-go's `WatchListClient`), so it is in no order of the API server's, and stays as it is until
//! kube-scheduler ends.

use anyhow::{Context, Result, ensure};
use proto::resource::{GPU_MEM, GPU_MEMORY_RATIO, GPU_SHARED};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use serde_json::{Value, json};

use super::kept_connection::wire;
use kit::pods::{Limits, PodBuilder, set_in};

/// Requests of pods. Each of them fits a node on which half of the GPUs are half full and one more has some
/// small pods.
pub(super) const SHAPES: [&Limits<'_>; 4] = [
    &[(GPU_MEM, "8")],
    &[(GPU_SHARED, "1"), (GPU_MEMORY_RATIO, "25")],
    &[(GPU_MEM, "1")],
    &[(GPU_SHARED, "2"), (GPU_MEMORY_RATIO, "100")],
];

#[derive(Debug)]
pub(super) struct PreparedRequests {
    /// Each kind of pod as JSON, split where the UID goes.
    pods: Vec<(String, String)>,
    /// kube-scheduler's list of nodes: every name once, in quotes.
    names: Vec<String>,
    /// The index in `names` at which the next request begins.
    start: usize,
    /// Requests made so far: each pod's shape and UID follow from it.
    n_asked: usize,
}

impl PreparedRequests {
    /// Requests about these nodes, by pods of all shapes in turn, each of about `pod_bytes`.
    pub(super) fn new(names: impl Iterator<Item = String>, pod_bytes: usize) -> Result<Self> {
        let pods = SHAPES.iter().map(|limits| pod(limits, pod_bytes));
        let mut names: Vec<String> = names.map(|name| format!("{name:?}")).collect();
        // The same order in every run, so that runs can be compared.
        names.shuffle(&mut StdRng::seed_from_u64(42));
        Ok(Self {
            pods: pods.collect::<Result<_>>()?,
            names,
            start: 0,
            n_asked: 0,
        })
    }

    /// The bytes of the next filter request: about a new pod, and the next `n_names` nodes of the list.
    pub(super) fn next(&mut self, n_names: usize) -> Result<Vec<u8>> {
        // Each request has a pod with a new UID: the scheduler keeps room for a pod that it has answered before.
        let (before, after) = self
            .pods
            .get(self.n_asked % self.pods.len().max(1))
            .context("there is no shape")?;
        let n_nodes = self.names.len();
        let n_names = n_names.min(n_nodes);
        let from_start = self.names.iter().cycle().skip(self.start).take(n_names);
        let names = from_start.map(String::as_str).collect::<Vec<_>>().join(",");
        self.start = (self.start + n_names) % n_nodes.max(1);
        let body = format!(
            r#"{{"Pod":{before}asked-{:08}{after},"Nodes":null,"NodeNames":[{names}]}}"#,
            self.n_asked
        );
        self.n_asked += 1;
        Ok(wire("/gpushare-scheduler/filter", body.as_bytes()))
    }
}

/// Fails if filter names no node. The answer is checked by its first bytes: parsing would take longer than the scheduler needs to
/// answer, and cool the caches between two requests.
pub(super) fn ensure_placed(answer: &[u8]) -> Result<()> {
    ensure!(
        answer.starts_with(br#"{"Nodes":null,"NodeNames":["node-"#),
        "filter answers {}",
        String::from_utf8_lossy(answer)
    );
    Ok(())
}

/// A pod as JSON of about `bytes`: the text before its UID, and the text after it.
fn pod(limits: &Limits<'_>, bytes: usize) -> Result<(String, String)> {
    const UID: &str = "UID-OF-THE-POD";
    let mut pod: Value = serde_json::to_value(PodBuilder::new("asked", limits).pod()?)?;
    let size = pod.to_string().len();
    let padding = "x".repeat(bytes.saturating_sub(size + 100));
    set_in(&mut pod, "metadata", "namespace", json!("default"));
    set_in(&mut pod, "metadata", "uid", json!(UID));
    set_in(
        &mut pod,
        "metadata",
        "annotations",
        json!({"example.com/padding": padding}),
    );
    let text = pod.to_string();
    let (before, after) = text.split_once(UID).context("a pod has no UID")?;
    Ok((before.to_owned(), after.to_owned()))
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::PreparedRequests;

    #[test]
    fn requests_go_round_the_list_of_nodes_with_a_new_pod_each() {
        let mut requests =
            PreparedRequests::new(["a", "b", "c"].into_iter().map(str::to_owned), 2048).unwrap();
        let mut ask = || {
            let wire = String::from_utf8(requests.next(2).unwrap()).unwrap();
            let (head, body) = wire.split_once("\r\n\r\n").unwrap();
            assert!(
                head.ends_with(&format!("Content-Length: {}", body.len())),
                "{head}"
            );
            assert!(body.len() > 1900 && body.len() < 2300, "{}", body.len());
            let body: Value = serde_json::from_str(body).unwrap();
            let names = serde_json::from_value::<[String; 2]>(body["NodeNames"].clone()).unwrap();
            (
                body["Pod"]["metadata"]["uid"].to_string(),
                names,
                body["Pod"]["spec"].to_string(),
            )
        };
        let (first, second, third, _, fifth) = (ask(), ask(), ask(), ask(), ask());
        let ([one, other], [third_of_list, again]) = (first.1, second.1);
        let mut all = [one.clone(), other.clone(), third_of_list.clone()];
        assert_eq!(
            (again, third.1),
            (one, [other, third_of_list]),
            "from the end of the list to its beginning"
        );
        all.sort();
        assert_eq!(all, ["a", "b", "c"]);
        assert!(first.0 != second.0 && second.0 != third.0);
        assert!(first.2 != second.2 && first.2 == fifth.2, "four shapes in turn");
    }
}
