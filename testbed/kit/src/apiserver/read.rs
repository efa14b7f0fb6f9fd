//! Lists, in pages that all show a collection at one revision.

use std::ops::ControlFlow;
use std::sync::Arc;

use super::selector::Selectors;
use super::status::ApiError;
use super::store::{Key, ObjectVersion, Slice, Store};

/// The parameters of a list.
#[derive(Debug, Clone, Default)]
pub(crate) struct ListQuery {
    pub(crate) namespace: Option<String>,
    pub(crate) selectors: Selectors,
    pub(crate) limit: Option<usize>,
    pub(crate) token: Option<String>,
    /// The `resourceVersion` parameter.
    pub(crate) revision: Option<u64>,
    /// True if the list must show exactly that revision, not a newer one.
    pub(crate) exact: bool,
}

/// One page of a list.
#[derive(Debug)]
pub(crate) struct ListPage {
    pub(crate) revision: u64,
    pub(crate) items: Vec<Arc<ObjectVersion>>,
    pub(crate) next: Option<String>,
    pub(crate) remaining: Option<usize>,
}

/// Reads one page of a list.
pub(crate) fn list(store: &Store, storage: &str, query: &ListQuery) -> Result<ListPage, ApiError> {
    let token = query.token.as_deref().map(parse_token).transpose()?;
    let current = store.revision();
    let asked = query.revision.filter(|rv| *rv > 0);
    if let Some(rv) = asked.filter(|rv| *rv > current) {
        return Err(ApiError::too_large_version(rv, current));
    }
    // All pages of a list show the revision of its first page, whatever has changed since.
    let at = match &token {
        Some((revision, _)) => *revision,
        None => asked.filter(|_| query.exact).unwrap_or(current),
    };
    let slice = Slice {
        namespace: query.namespace.as_deref(),
        after: token.as_ref().map(|(_, key)| key),
        at: Some(at).filter(|at| *at != current),
    };
    let limit = query.limit.filter(|l| *l > 0).unwrap_or(usize::MAX);
    let (mut items, mut last, mut n_left) = (Vec::new(), None, 0);
    let counting = query.selectors.is_everything();
    store
        .scan(storage, slice, |key, version| {
            if !counting && !query.selectors.matches(&version.value) {
                return ControlFlow::Continue(());
            }
            if items.len() == limit {
                n_left += 1;
                return if counting {
                    ControlFlow::Continue(())
                } else {
                    ControlFlow::Break(())
                };
            }
            items.push(Arc::clone(version));
            if items.len() == limit {
                last = Some(key.clone());
            }
            ControlFlow::Continue(())
        })
        .map_err(|compacted| expired(at, compacted.oldest, token.is_some()))?;
    let next = last
        .filter(|_| n_left > 0)
        .map(|key| format!("{at}/{}/{}", key.namespace, key.name));
    // The real server counts the rest by keys in etcd, where it cannot apply a selector.
    let remaining = (counting && next.is_some()).then_some(n_left);
    Ok(ListPage {
        revision: at,
        items,
        next,
        remaining,
    })
}

/// The 410 for a revision that is no longer in the log; a list that continues gets the advice to start again.
fn expired(at: u64, oldest: u64, continued: bool) -> ApiError {
    let mut error = ApiError::expired(at, oldest);
    if continued {
        "The provided continue parameter is too old to display a consistent list result. You must start a new list \
         without the continue parameter."
            .clone_into(&mut error.message);
    }
    error
}

/// The revision and key in a `continue` token.
fn parse_token(token: &str) -> Result<(u64, Key), ApiError> {
    let parts: Vec<&str> = token.splitn(3, '/').collect();
    if let [revision, namespace, name] = parts.as_slice()
        && let Ok(revision) = revision.parse()
    {
        return Ok((revision, Key::new(*namespace, *name)));
    }
    Err(ApiError::bad_request("continue key is not valid"))
}
