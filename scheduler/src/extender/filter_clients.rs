//! The clients that send filter requests, for `kubectl gpushare doctor`: a kube-scheduler that is configured with the extender
//! shows here, and so does one that should not be.

use axum::body::Body;
use daemon::http_server::ClientName;
use http::{Request, header};
use parking_lot::Mutex;
use proto::read_api::FilterClient;

use crate::api_server::shorten;
use crate::read_api::{header_text, unix_time};

/// The most clients that are remembered: any program may connect, under any name.
const MAX_CLIENTS: usize = 8;

/// The number of filter requests, and the latest clients that have sent them.
#[derive(Debug, Default)]
pub(super) struct FilterClients(Mutex<(u64, Vec<FilterClient>)>);

impl FilterClients {
    /// Counts a request for its client: the name in the client's certificate, and the `User-Agent`.
    pub(super) fn count(&self, request: &Request<Body>) {
        let user_agent = header_text(request.headers(), header::USER_AGENT).unwrap_or_default();
        // Shortened before the comparison with the kept texts, which are shortened too.
        let user_agent = shorten(user_agent.trim());
        let name = request.extensions().get::<ClientName>();
        let name = name.map(|name| shorten(&name.0)).unwrap_or_default();
        let last = unix_time().as_secs();
        let (n_requests, clients) = &mut *self.0.lock();
        *n_requests += 1;
        for known in &mut *clients {
            if known.name == name && known.user_agent == user_agent {
                known.requests += 1;
                known.last = last;
                return;
            }
        }
        // The client that was seen first gives way; if it sends requests still, it is remembered again.
        if clients.len() >= MAX_CLIENTS {
            clients.remove(0);
        }
        clients.push(FilterClient {
            name,
            user_agent,
            requests: 1,
            last,
        });
    }

    /// The number of filter requests so far, and the clients that are remembered.
    pub(super) fn read(&self) -> (u64, Vec<FilterClient>) {
        self.0.lock().clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(user_agent: &str) -> Request<Body> {
        let request = Request::post("/filter").header(header::USER_AGENT, user_agent);
        request.body(Body::empty()).unwrap()
    }

    /// The text was compared whole and kept shortened, so that such a client was a new one at each request.
    #[test]
    fn a_client_with_a_long_user_agent_is_one_client() {
        let clients = FilterClients::default();
        for user_agent in ["a".repeat(501), "a".repeat(501), " kube-scheduler ".to_owned()] {
            clients.count(&request(&user_agent));
        }
        let (n_requests, clients) = clients.read();
        let counts: Vec<_> = clients
            .iter()
            .map(|client| (client.user_agent.len(), client.requests))
            .collect();
        assert_eq!((n_requests, counts), (3, vec![(500, 2), (14, 1)]));
    }
}
