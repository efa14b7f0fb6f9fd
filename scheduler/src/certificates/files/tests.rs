//! Files change under a running daemon, in paused time: the new ones are used if they can be, else the old ones.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use prometheus_client::registry::Registry;
use rcgen::{CertificateParams, CertifiedKey, KeyPair, date_time_ymd, generate_simple_self_signed};
use rstest::rstest;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tempfile::TempDir;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::*;

const LABELS: [&str; 2] = ["extender", "extender-client-ca"];

/// A certificate and its key.
type Pair = CertifiedKey<KeyPair>;

fn pair() -> Pair {
    generate_simple_self_signed(["localhost".to_owned()]).unwrap()
}

/// A certificate that ends at the beginning of a year.
fn pair_until(year: i32) -> Pair {
    let mut params = CertificateParams::new(["localhost".to_owned()]).unwrap();
    params.not_after = date_time_ymd(year, 1, 1);
    let signing_key = KeyPair::generate().unwrap();
    let cert = params.self_signed(&signing_key).unwrap();
    Pair { cert, signing_key }
}

/// A Secret as kubelet mounts it: files link into a folder of one version, which a link names.
struct Mount {
    dir: TempDir,
    n_versions: u32,
}

impl Mount {
    fn new(pair: &Pair) -> Self {
        let mut mount = Self {
            dir: tempfile::tempdir().unwrap(),
            n_versions: 0,
        };
        for file in ["tls.crt", "tls.key", "ca.crt"] {
            symlink(Path::new("..data").join(file), mount.dir.path().join(file)).unwrap();
        }
        mount.put(
            &pair.cert.pem(),
            Some(&pair.signing_key.serialize_pem()),
            &pair.cert.pem(),
        );
        mount
    }

    /// Replaces all files at once, as kubelet does; without `key` there is no file of the key.
    fn put(&mut self, cert: &str, key: Option<&str>, client_ca: &str) {
        self.n_versions += 1;
        let version = self.dir.path().join(self.n_versions.to_string());
        fs::create_dir(&version).unwrap();
        fs::write(version.join("tls.crt"), cert).unwrap();
        fs::write(version.join("ca.crt"), client_ca).unwrap();
        if let Some(key) = key {
            fs::write(version.join("tls.key"), key).unwrap();
        }
        let link = self.dir.path().join("..new");
        symlink(&version, &link).unwrap();
        fs::rename(link, self.dir.path().join("..data")).unwrap();
    }

    fn files(&self) -> TlsFiles {
        let path = |file| self.dir.path().join(file);
        TlsFiles {
            cert: path("tls.crt"),
            key: path("tls.key"),
            client_ca: Some(path("ca.crt")),
        }
    }

    fn load(&self) -> CertificateFiles {
        let metrics = CertificateMetrics::register(&mut Registry::default());
        CertificateFiles::load(self.files(), metrics, LABELS).unwrap()
    }

    /// Begins to follow the files.
    fn follow(&self) -> CurrentTls {
        let certificates = self.load();
        let current = certificates.current();
        tokio::spawn(certificates.follow());
        current
    }
}

/// Returns true if a server with these settings shows this certificate to a new connection.
async fn shows(current: &CurrentTls, expected: &Pair) -> bool {
    let mut roots = RootCertStore::empty();
    roots.add(expected.cert.der().clone()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap();
    let connector = TlsConnector::from(Arc::new(
        builder.with_root_certificates(roots).with_no_client_auth(),
    ));
    let (client, server) = tokio::io::duplex(1 << 16);
    let accepted = TlsAcceptor::from(Arc::clone(&current.borrow())).accept(server);
    let connected = connector.connect(ServerName::try_from("localhost").unwrap(), client);
    tokio::join!(accepted, connected).1.is_ok()
}

#[tokio::test(start_paused = true)]
async fn a_rotated_certificate_is_shown_to_new_connections() {
    let (old, new) = (pair(), pair());
    let mut mount = Mount::new(&old);
    let current = mount.follow();
    assert!(shows(&current, &old).await && !shows(&current, &new).await);
    mount.put(
        &new.cert.pem(),
        Some(&new.signing_key.serialize_pem()),
        &old.cert.pem(),
    );
    tokio::time::sleep(INTERVAL * 2).await;
    assert!(shows(&current, &new).await && !shows(&current, &old).await);
}

#[rstest]
#[case::certificate_without_its_key(|new: &Pair, old: &Pair| (new.cert.pem(), Some(old.signing_key.serialize_pem()), old.cert.pem()))]
#[case::half_a_certificate(|new: &Pair, _: &Pair| (new.cert.pem()[..100].to_owned(), Some(new.signing_key.serialize_pem()), new.cert.pem()))]
#[case::half_a_key(|new: &Pair, _: &Pair| (new.cert.pem(), Some(new.signing_key.serialize_pem()[..60].to_owned()), new.cert.pem()))]
#[case::no_key(|new: &Pair, _: &Pair| (new.cert.pem(), None, new.cert.pem()))]
#[case::empty_certificate(|new: &Pair, _: &Pair| (String::new(), Some(new.signing_key.serialize_pem()), new.cert.pem()))]
#[case::no_authority(|new: &Pair, _: &Pair| (new.cert.pem(), Some(new.signing_key.serialize_pem()), "nonsense".to_owned()))]
#[tokio::test(start_paused = true)]
async fn incomplete_certificate_files_are_ignored_until_they_are_whole(
    #[case] written: fn(&Pair, &Pair) -> (String, Option<String>, String),
) {
    let (old, new) = (pair(), pair());
    let mut mount = Mount::new(&old);
    let current = mount.follow();
    let (cert, key, client_ca) = written(&new, &old);
    mount.put(&cert, key.as_deref(), &client_ca);
    tokio::time::sleep(INTERVAL * 3).await;
    assert!(shows(&current, &old).await, "the old one stays");
    mount.put(
        &new.cert.pem(),
        Some(&new.signing_key.serialize_pem()),
        &new.cert.pem(),
    );
    tokio::time::sleep(INTERVAL * 2).await;
    assert!(
        shows(&current, &new).await,
        "the new one is used once it is whole"
    );
}

#[tokio::test(start_paused = true)]
async fn unchanged_files_do_not_replace_the_certificates_in_use() {
    let old = pair();
    let mut mount = Mount::new(&old);
    let current = mount.follow();
    let key = old.signing_key.serialize_pem();
    mount.put(&old.cert.pem(), Some(&key), &old.cert.pem());
    tokio::time::sleep(INTERVAL * 2).await;
    assert!(!current.has_changed().unwrap(), "the same in a new folder");
    mount.put(&old.cert.pem(), Some(&key), &pair().cert.pem());
    tokio::time::sleep(INTERVAL * 2).await;
    assert!(current.has_changed().unwrap(), "other authorities for clients");
}

/// Metrics show the certificates in use, and none of files that cannot be used.
#[tokio::test(start_paused = true)]
async fn metrics_show_the_ends_of_the_certificates_in_use() {
    // Ends at the beginning of 2030, 2031 and 2032.
    let [end_of_old, end_of_new, end_of_authority] = [1_893_456_000, 1_924_992_000, 1_956_528_000];
    let (old, new, authority) = (pair_until(2030), pair_until(2031), pair_until(2032));
    let mut mount = Mount::new(&old);
    let certificates = mount.load();
    let metrics = certificates.metrics.clone();
    tokio::spawn(certificates.follow());
    let ends = |server, clients| vec![(LABELS[0], server), (LABELS[1], clients)];
    assert_eq!(metrics.all_ends(), ends(end_of_old, end_of_old));
    mount.put(&new.cert.pem(), Some("nonsense"), &authority.cert.pem());
    tokio::time::sleep(INTERVAL * 2).await;
    assert_eq!(metrics.all_ends(), ends(end_of_old, end_of_old));
    mount.put(
        &new.cert.pem(),
        Some(&new.signing_key.serialize_pem()),
        &authority.cert.pem(),
    );
    tokio::time::sleep(INTERVAL * 2).await;
    assert_eq!(metrics.all_ends(), ends(end_of_new, end_of_authority));
}
