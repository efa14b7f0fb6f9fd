//! The views of one node and of all nodes, which are streamed or divided into pages.

use std::collections::VecDeque;
use std::ops::ControlFlow;

use serde::Serialize;

use super::json;
use crate::index::{Index, InspectedNode, Shared};

/// The number of names that are read from the index under one lock.
const NAMES: usize = 1000;

/// The answer for nodes.
#[derive(Debug, Default, Serialize)]
struct Inspected {
    nodes: Vec<InspectedNode>,
    #[serde(skip_serializing_if = "String::is_empty")]
    error: String,
}

/// The JSON of one node, if the index has it.
pub(super) fn show(node: Option<InspectedNode>, name: &str) -> Vec<u8> {
    let mut answer = Inspected::default();
    match node {
        Some(node) => answer.nodes.push(node),
        None => answer.error = format!("there is no node {name:?}"),
    }
    json(&answer)
}

/// A part of all nodes, in the order of their names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Page {
    /// The largest number of nodes; `None` for all.
    limit: Option<usize>,
    /// The last node of the page before.
    after: Option<String>,
}

impl Page {
    /// Parses a query such as `limit=500&continue=n0499`; the error says what to write.
    pub(super) fn parse(query: &str) -> Result<Self, String> {
        let mut page = Self::default();
        for (key, value) in query.split('&').filter_map(|pair| pair.split_once('=')) {
            match key {
                "limit" => {
                    let Ok(limit) = value.parse::<usize>() else {
                        return Err(format!(
                            "limit={value:?}: write a whole number, such as limit=500"
                        ));
                    };
                    // Zero means no limit, as in the Kubernetes API.
                    page.limit = (limit > 0).then_some(limit);
                }
                "continue" if value.bytes().all(is_in_names) => {
                    page.after = (!value.is_empty()).then(|| value.to_owned());
                }
                "continue" => {
                    return Err(format!(
                        "continue={value:?}: write what the page before says in \"continue\""
                    ));
                }
                _ => {}
            }
        }
        Ok(page)
    }
}

/// Returns true if names of nodes may have this character.
fn is_in_names(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-.".contains(&byte)
}

/// Writes a page node by node; holds no lock in between.
#[derive(Debug)]
pub(super) struct NodeListing {
    page: Page,
    /// Names that have been read from the index, and whose nodes have not been written.
    names: VecDeque<String>,
    n_written: usize,
    has_begun: bool,
}

impl NodeListing {
    /// A listing of which nothing is written yet.
    pub(super) fn new(page: Page) -> Self {
        Self {
            page,
            names: VecDeque::new(),
            n_written: 0,
            has_begun: false,
        }
    }

    /// Writes the next node, or the end of the page.
    pub(super) fn write_next(&mut self, index: &Shared<Index>, json: &mut Vec<u8>) -> ControlFlow<()> {
        if !std::mem::replace(&mut self.has_begun, true) {
            json.extend_from_slice(b"{\"nodes\":[");
        }
        let is_full = self.page.limit.is_some_and(|limit| self.n_written >= limit);
        // A thousand names at a time: one by one, the search for the next name would take as long as the whole list.
        if !is_full && self.names.is_empty() {
            let index = index.read();
            self.names = index.gpu_nodes_after(self.page.after.as_deref(), NAMES).into();
        }
        let Some(name) = (if is_full { None } else { self.names.pop_front() }) else {
            self.write_end(index, json);
            return ControlFlow::Break(());
        };
        // A node may be gone since its name was read.
        let shown = index.read().show_node(&name);
        if let Some(node) = shown {
            if self.n_written > 0 {
                json.push(b',');
            }
            json.extend_from_slice(&super::json(&node));
            self.n_written += 1;
        }
        self.page.after = Some(name);
        ControlFlow::Continue(())
    }

    /// Ends the JSON: on a limited page with the name from which the next page continues, if there is a next one.
    fn write_end(&self, index: &Shared<Index>, json: &mut Vec<u8>) {
        json.push(b']');
        // Only a limited page says where the next one begins, and only if there is one.
        let last = self.page.after.as_deref().filter(|_| self.page.limit.is_some());
        if let Some(last) = last.filter(|last| !index.read().gpu_nodes_after(Some(last), 1).is_empty()) {
            json.extend_from_slice(b",\"continue\":");
            json.extend_from_slice(&super::json(&last));
        }
        json.push(b'}');
    }
}
