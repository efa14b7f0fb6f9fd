//! A small API server behind kube's client: Secrets with resource versions, and webhook configurations.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use http::{Method, Request, Response, StatusCode};
use http_body_util::BodyExt;
use kube::client::Body;
use serde_json::{Value, json};

/// The server; clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Api(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    objects: BTreeMap<String, Value>,
    version: u64,
    writes: Vec<String>,
    /// Answers to give instead of the next ones.
    faults: Vec<StatusCode>,
}

pub(crate) const SECRET: &str = "/api/v1/namespaces/gpushare-system/secrets/certificates";
pub(crate) const MUTATING: &str =
    "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/gpushare-scheduler";
pub(crate) const VALIDATING: &str =
    "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations/gpushare-scheduler";

impl Api {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    pub(crate) fn client(&self) -> kube::Client {
        let api = self.clone();
        kube::Client::new(
            tower::service_fn(move |request| api.clone().answer(request)),
            "gpushare-system",
        )
    }

    pub(crate) fn object(&self, path: &str) -> Option<Value> {
        self.state().objects.get(path).cloned()
    }

    pub(crate) fn put(&self, path: &str, object: Value) {
        let mut state = self.state();
        state.store(path, object);
    }

    pub(crate) fn remove(&self, path: &str) {
        self.state().objects.remove(path);
    }

    pub(crate) fn fail(&self, faults: &[u16]) {
        self.state().faults = faults
            .iter()
            .map(|fault| StatusCode::from_u16(*fault).unwrap())
            .collect();
    }

    /// Method and path of every request that changed something.
    pub(crate) fn writes(&self) -> Vec<String> {
        self.state().writes.clone()
    }

    async fn answer(self, request: Request<Body>) -> Result<Response<Body>, std::io::Error> {
        let (parts, body) = request.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        // Others may come in between.
        tokio::task::yield_now().await;
        let mut state = self.state();
        if !state.faults.is_empty() {
            let fault = state.faults.remove(0);
            return Ok(failure(fault.as_u16()));
        }
        let path = parts.uri.path();
        Ok(match parts.method {
            Method::GET => state
                .objects
                .get(path)
                .map_or_else(|| failure(404), |object| reply(200, object)),
            Method::POST => {
                let object: Value = serde_json::from_slice(&body).unwrap();
                let path = format!("{path}/{}", object["metadata"]["name"].as_str().unwrap());
                if state.objects.contains_key(&path) {
                    failure(409)
                } else {
                    state.write("POST", &path, object)
                }
            }
            Method::PUT => {
                let object: Value = serde_json::from_slice(&body).unwrap();
                match state.objects.get(path) {
                    None => failure(404),
                    Some(there)
                        if there["metadata"]["resourceVersion"] != object["metadata"]["resourceVersion"] =>
                    {
                        failure(409)
                    }
                    Some(_) => state.write("PUT", path, object),
                }
            }
            Method::PATCH => {
                assert_eq!(parts.headers["content-type"], "application/json-patch+json");
                let changes: json_patch::Patch = serde_json::from_slice(&body).unwrap();
                let mut object = state.objects[path].clone();
                match json_patch::patch(&mut object, &changes) {
                    Ok(()) => state.write("PATCH", path, object),
                    Err(_) => failure(422),
                }
            }
            _ => failure(405),
        })
    }
}

impl State {
    fn write(&mut self, method: &str, path: &str, object: Value) -> Response<Body> {
        self.writes.push(format!("{method} {path}"));
        self.store(path, object);
        reply(200, &self.objects[path])
    }

    fn store(&mut self, path: &str, mut object: Value) {
        self.version += 1;
        object["metadata"]["resourceVersion"] = self.version.to_string().into();
        self.objects.insert(path.to_owned(), object);
    }
}

fn failure(status: u16) -> Response<Body> {
    let reason = match status {
        403 => "Forbidden",
        404 => "NotFound",
        409 => "Conflict",
        _ => "Invalid",
    };
    reply(
        status,
        &json!({"kind": "Status", "status": "Failure", "message": "no", "reason": reason, "code": status}),
    )
}

fn reply(status: u16, body: &Value) -> Response<Body> {
    Response::builder()
        .status(status)
        .body(Body::from(body.to_string().into_bytes()))
        .unwrap()
}
