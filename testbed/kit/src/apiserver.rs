//! A model of kube-apiserver, for real clients that talk to it over HTTP on loopback.
//!
//! Admission policies are compared with kube-apiserver 1.36.2, by the answers recorded in `tests/apiserver/policies.rs`; other
//! rules follow the code of 1.33, the version that the model reports. Names such as `BeforeDelete` in comments are functions of
//! that code. It leaves out authorisation (every request is allowed, and recorded), built-in admission plugins, controllers,
//! persistence, the group `events.k8s.io`, conversion between versions of a custom resource, and protobuf, so that
//! `kubectl create namespace` and the like, which send nothing else, get 415.
//!
//! `http` and, for callers in this process, [`ApiObjects`] are thin layers over `verbs`, which is synchronous.

mod access;
mod admission;
mod api_objects;
pub mod command;
mod container_programs;
mod discovery;
mod faults;
mod http;
mod name;
pub mod object;
mod patch;
mod pod;
mod read;
mod render;
mod resource;
mod selector;
mod status;
mod store;
mod table;
mod verbs;
mod watch;

use std::collections::BTreeSet;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;

use anyhow::Result;
use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::{CancellationToken, DropGuard};

pub use self::access::{UsedAccess, User};
pub use self::api_objects::ApiObjects;
pub use self::faults::{Fault, Faults, HeldWatches, Injected, Matching};
pub use self::status::ApiError;

use self::access::Tokens;
use self::http::Server;
use crate::files;

/// The number of changes that the server keeps for each resource; a watch or `continue` token from before them gets 410.
const EVENT_WINDOW: usize = 50_000;

/// A running API server. Dropping this handle stops the server without waiting for running requests.
#[derive(Debug)]
pub struct ApiServer {
    address: SocketAddr,
    server: Arc<Server>,
    serving: JoinHandle<()>,
    stop: DropGuard,
}

impl ApiServer {
    /// Starts a server with an empty cluster on a free port of loopback. Without any token it authenticates no request.
    pub async fn start() -> io::Result<Self> {
        Self::start_with(ApiObjects::new(EVENT_WINDOW), 0).await
    }

    /// Starts a server over an existing cluster, such as that of a server that was shut down; port 0 takes a free port.
    pub async fn start_with(objects: ApiObjects, port: u16) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await?;
        let address = listener.local_addr()?;
        let server = Arc::new(Server {
            objects,
            tokens: Tokens::default(),
            accesses: Mutex::default(),
            faults: Faults::new(),
            stopping: CancellationToken::new(),
        });
        let serving = tokio::spawn(http::serve(listener, Arc::clone(&server)));
        let stop = server.stopping.clone().drop_guard();
        Ok(Self {
            address,
            server,
            serving,
            stop,
        })
    }

    /// Base URL without a trailing slash.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The address that the server listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The objects behind the server, without HTTP.
    pub fn objects(&self) -> &ApiObjects {
        &self.server.objects
    }

    /// Faults that the server injects.
    pub fn faults(&self) -> &Faults {
        &self.server.faults
    }

    /// A bearer token of a user, if the user has any.
    pub fn token_of(&self, user: &str) -> Option<String> {
        self.server.tokens.token_of(user)
    }

    /// The kinds of access that have been used over HTTP so far.
    pub fn accesses(&self) -> BTreeSet<UsedAccess> {
        self.server.accesses.lock().clone()
    }

    /// Adds a token for a user. The first token turns authentication on: from then on requests without a token get 401.
    pub fn add_token(&self, token: &str, user: User) {
        self.server.tokens.add(token.to_owned(), user);
    }

    /// Writes a kubeconfig file for a user; it holds the user's token if there is one. A daemon may read the file at this moment.
    pub fn kubeconfig(&self, path: &Path, user: &str) -> Result<()> {
        self.kubeconfig_with(path, user, self.server.tokens.token_of(user).as_deref())
    }

    /// Writes a kubeconfig file for a user with this token: a user may have several.
    pub fn kubeconfig_with(&self, path: &Path, user: &str, token: Option<&str>) -> Result<()> {
        files::replace(path, &access::kubeconfig(&self.url(), user, token))
    }

    /// Stops accepting, ends all watches, and waits for the running requests.
    pub async fn shutdown(self) {
        drop(self.stop);
        if let Err(error) = self.serving.await {
            tracing::warn!(%error, "the API server did not end cleanly");
        }
    }
}
