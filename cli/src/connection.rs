//! The connection to the API server, from the kubeconfig and the flags.

use std::time::Duration;

use http::HeaderName;
use kube::api::ListParams;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::core::{ObjectList, Request};
use kube::{Client, Config, Resource};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::time::timeout;

use crate::args::ConnectionArgs;
use crate::failure::{CommandFailure, with_sources};

const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);
// As large as the pages of kubectl.
const PAGE_SIZE: u32 = 500;

/// The connection of a command to the cluster, by the kubeconfig and the flags.
#[derive(Clone)]
pub(crate) struct ClusterConnection {
    pub(crate) args: ConnectionArgs,
    /// The client of the API server, or the reason that there is none.
    client: Result<Client, String>,
    /// The namespace of the pods that the command is about: that of `--namespace`, or of the kubeconfig's context.
    pub(crate) namespace: String,
}

impl ClusterConnection {
    /// Reads the kubeconfig; sends no request.
    pub(crate) async fn new(args: ConnectionArgs) -> Result<Self, CommandFailure> {
        let (client, default_namespace) = match config(&args).await {
            Ok(config) => {
                let namespace = config.default_namespace.clone();
                let client = Client::try_from(config);
                (client.map_err(|error| with_sources(&error)), namespace)
            }
            Err(reason) => (Err(reason), "default".to_owned()),
        };
        // With the address of a read API, most commands need no API server.
        if let (Err(reason), None) = (&client, &args.read_api) {
            return Err(CommandFailure::Kubeconfig(reason.clone()));
        }
        Ok(Self {
            namespace: args.namespace.clone().unwrap_or(default_namespace),
            args,
            client,
        })
    }

    /// A connection with this client of the API server, in the namespace `default`.
    #[cfg(test)]
    pub(crate) fn of(args: ConnectionArgs, client: Client) -> Self {
        Self {
            args,
            client: Ok(client),
            namespace: "default".to_owned(),
        }
    }

    /// The client of the API server; a failure if the kubeconfig has none, as with `--read-api` alone.
    pub(crate) fn client(&self) -> Result<Client, CommandFailure> {
        self.client.clone().map_err(CommandFailure::Kubeconfig)
    }

    pub(crate) async fn get(&self, action: &str, path: &str) -> Result<Option<Value>, CommandFailure> {
        let request = http::Request::get(path).body(Vec::new());
        self.send(action, request.map_err(CommandFailure::input)?).await
    }

    /// Sends an object with a request; `None` if there is nothing at its path.
    pub(crate) async fn write(
        &self,
        action: &str,
        request: http::request::Builder,
        object: &Value,
    ) -> Result<Option<Value>, CommandFailure> {
        let request = request.body(object.to_string().into_bytes());
        self.send(action, request.map_err(CommandFailure::input)?).await
    }

    /// Checks that a namespace exists. Passes if the user may not read namespaces, or no API server answers.
    pub(crate) async fn check_namespace(&self, name: &str) -> Result<(), CommandFailure> {
        // The name becomes a part of a path, and with other characters it would be another path.
        let is_plain = name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
        let path = format!("/api/v1/namespaces/{name}");
        if is_plain && !matches!(self.get("read the namespace", &path).await, Ok(None)) {
            return Ok(());
        }
        Err(CommandFailure::Input(format!(
            "namespace \"{name}\" does not exist; `kubectl get namespaces` lists all"
        )))
    }

    /// All objects of a kind, in one namespace or in all, that a label selector selects.
    pub(crate) async fn list<K>(
        &self,
        namespace: Option<&str>,
        selector: Option<&str>,
    ) -> Result<Vec<K>, CommandFailure>
    where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned,
    {
        self.list_pages(K::url_path(&(), namespace), selector).await
    }

    pub(crate) async fn list_json(&self, path: &str) -> Result<Vec<Value>, CommandFailure> {
        self.list_pages(path.to_owned(), None).await
    }

    /// The objects of the list at a path; none if the API server does not know their kind.
    async fn list_pages<T: Clone + DeserializeOwned>(
        &self,
        path: String,
        selector: Option<&str>,
    ) -> Result<Vec<T>, CommandFailure> {
        let action = format!("list {}", path.rsplit('/').next().unwrap_or_default());
        let path = Request::new(path);
        let mut params = ListParams::default().limit(PAGE_SIZE);
        params.label_selector = selector.map(str::to_owned);
        let mut objects = Vec::new();
        loop {
            let request = path.list(&params).map_err(CommandFailure::input)?;
            let Some(page) = self.send::<ObjectList<T>>(&action, request).await? else {
                return Ok(objects);
            };
            objects.extend(page.items);
            // An API server without more pages leaves the token out, or sends an empty one.
            match page.metadata.continue_ {
                Some(token) if !token.is_empty() => params.continue_token = Some(token),
                _ => return Ok(objects),
            }
        }
    }

    /// The answer to a request; `None` if there is nothing at its path. `action` completes "cannot …".
    async fn send<T: DeserializeOwned>(
        &self,
        action: &str,
        request: http::Request<Vec<u8>>,
    ) -> Result<Option<T>, CommandFailure> {
        let client = self.client()?;
        match timeout(ANSWER_TIMEOUT, client.request::<T>(request)).await {
            Ok(Ok(answer)) => Ok(Some(answer)),
            Ok(Err(kube::Error::Api(status))) if status.code == 404 => Ok(None),
            Ok(Err(error)) => Err(CommandFailure::of_kube(action, error)),
            // The server accepts the connection, and does not answer.
            Err(_) => Err(CommandFailure::Unreachable(format!(
                "no answer within {ANSWER_TIMEOUT:?} to the request to {action}"
            ))),
        }
    }
}

async fn config(args: &ConnectionArgs) -> Result<Config, String> {
    let options = KubeConfigOptions {
        context: args.context.clone(),
        ..KubeConfigOptions::default()
    };
    let config = match &args.kubeconfig {
        // As for kubectl, --kubeconfig wins over KUBECONFIG, whose files would be merged.
        Some(path) => match Kubeconfig::read_from(path) {
            Ok(kubeconfig) => Config::from_custom_kubeconfig(kubeconfig, &options).await,
            Err(error) => Err(error),
        },
        None => Config::from_kubeconfig(&options).await,
    };
    let mut config = config.map_err(|error| with_sources(&error))?;
    // kube's retries take minutes, in which a command would seem to hang.
    config.default_retry = false;
    if let Some(user) = &args.impersonate {
        config
            .headers
            .push((HeaderName::from_static("impersonate-user"), user.clone()));
    }
    Ok(config)
}

#[cfg(test)]
mod tests;
