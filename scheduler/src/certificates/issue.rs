//! The command `issue-client-certificate`: a client certificate for kube-scheduler, signed by the authority in the Secret.

use std::fs::{self, OpenOptions};
use std::io::Write;
#[cfg(unix)]
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, SystemTime};

use anyhow::Context;
use k8s_openapi::api::core::v1::Secret;
use kube::{Api, Client};

use super::material::Material;

/// A client certificate to issue.
#[derive(Clone, Debug)]
pub struct CertificateOrder {
    /// The Secret that holds the authority.
    pub secret: String,
    /// Namespace of the Secret.
    pub namespace: String,
    /// The name of the client.
    pub name: String,
    /// Lifetime of the certificate; it ends with the authority's at the latest.
    pub lifetime: Duration,
}

/// Writes `ca.crt`, `client.crt` and `client.key` into a folder; changes nothing in the cluster.
///
/// # Errors
/// The Secret cannot be read, it has no authority yet, or a file cannot be written.
pub async fn issue(client: Client, order: &CertificateOrder, folder: &Path) -> anyhow::Result<()> {
    let api: Api<Secret> = Api::namespaced(client, &order.namespace);
    let name = format!("Secret {}/{}", order.namespace, order.secret);
    let secret = api.get(&order.secret).await.context(name.clone())?;
    let material = Material::read(&secret.data.unwrap_or_default()).context(name.clone())?;
    let material = material.context(format!("{name} is empty: the scheduler has not filled it yet"))?;
    let (certificate, key) = material.client_certificate(&order.name, order.lifetime, SystemTime::now())?;
    fs::create_dir_all(folder).with_context(|| format!("folder {}", folder.display()))?;
    let authorities = material.authorities();
    for (file, text) in [
        ("ca.crt", authorities),
        ("client.crt", certificate),
        ("client.key", key),
    ] {
        let path = folder.join(file);
        write(&path, &text).with_context(|| format!("file {}", path.display()))?;
    }
    Ok(())
}

/// Replaces a file by one that only its owner may read.
fn write(path: &Path, text: &str) -> std::io::Result<()> {
    // Written under another name first: a program that reads meanwhile finds the old file or the new one, never half a key.
    let new = path.with_extension("new");
    // An earlier attempt may have left it; usually there is none, which is no error.
    let _ = fs::remove_file(&new);
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    options.mode(0o600);
    let mut file = options.open(&new)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs::rename(new, path)
}
