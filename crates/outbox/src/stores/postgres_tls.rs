//! TLS to PostgreSQL, with libpq's words for it: `sslmode`, `sslrootcert`, `sslcert` and `sslkey` in the URL.
//!
//! As with libpq, `prefer` (the default) and `require` encrypt without asking who is there, unless `sslrootcert` says
//! whom to trust: Debian's own servers come with a certificate nobody signed.

use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};
use tokio_postgres::Config;
use tokio_postgres::config::SslMode;
use tokio_postgres_rustls::MakeRustlsConnect;

use crate::error::{Error, Result};

/// How much is asked of the server's certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trust {
    Anybody,
    /// Signed by whom we trust, whatever the name in it.
    Signed,
    SignedForThisHost,
}

/// Reads a URL: the driver's configuration, and the TLS it asks for.
pub fn configure(url: &str) -> Result<(Config, MakeRustlsConnect)> {
    let (base, query) = url.split_once('?').unwrap_or((url, ""));
    let (mut trust, mut mode) = (None, None);
    let (mut root, mut certificate, mut key) = (None, None, None);
    // The driver knows neither the verifying modes nor the files.
    let mut rest = url::form_urlencoded::Serializer::new(String::new());
    for (name, value) in url::form_urlencoded::parse(query.as_bytes()) {
        match (&*name, &*value) {
            ("sslmode", "verify-ca") => (trust, mode) = (Some(Trust::Signed), Some(SslMode::Require)),
            ("sslmode", "verify-full") => (trust, mode) = (Some(Trust::SignedForThisHost), Some(SslMode::Require)),
            ("sslrootcert", path) => root = Some(path.to_owned()),
            ("sslcert", path) => certificate = Some(path.to_owned()),
            ("sslkey", path) => key = Some(path.to_owned()),
            (name, value) => drop(rest.append_pair(name, value)),
        }
    }
    let rest = rest.finish().replace('+', "%20");
    let plain = if rest.is_empty() { base.to_owned() } else { format!("{base}?{rest}") };
    let mut config: Config = plain.parse().map_err(|e: tokio_postgres::Error| {
        let cause = super::postgres::chain(&e);
        Error::invalid(format!(
            "`{}` is no PostgreSQL URL: {cause}; write postgres://USER:PASSWORD@HOST:5432/DATABASE",
            super::without_password(url),
        ))
    })?;
    if let Some(mode) = mode {
        config.ssl_mode(mode);
    }
    let trust = trust.unwrap_or(if root.is_some() { Trust::SignedForThisHost } else { Trust::Anybody });
    let provider = Arc::new(ring::default_provider());
    let verifier = Verifier { trust, inner: verifier(root.as_deref(), &provider)?, provider: provider.clone() };
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|e| Error::invalid(format!("TLS: {e}")))?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier));
    let client = match (certificate, key) {
        (Some(certificate), Some(key)) => {
            let private =
                PrivateKeyDer::from_pem_file(&key).map_err(|e| unreadable("sslkey", &key, &why_no_pem(&e)))?;
            let chain = certificates("sslcert", &certificate)?;
            builder.with_client_auth_cert(chain, private).map_err(|e| unreadable("sslcert", &certificate, &e))?
        }
        (None, None) => builder.with_no_client_auth(),
        _ => return Err(Error::invalid("sslcert and sslkey go together: give both files or none")),
    };
    Ok((config, MakeRustlsConnect::new(client)))
}

/// Why a file of ours cannot be used. The parser repeats what it has read, which may be a private key.
pub fn why_no_pem(error: &pem::Error) -> String {
    match error {
        pem::Error::Io(error) => error.to_string(),
        pem::Error::NoItemsFound => "there is none in it".to_owned(),
        _ => "it is damaged, or its lines have run together".to_owned(),
    }
}

fn unreadable(what: &str, path: &str, error: &dyn std::fmt::Display) -> Error {
    Error::invalid(format!("{what} = {path} cannot be used: {error}; it must be a readable PEM file"))
}

fn certificates(what: &str, path: &str) -> Result<Vec<CertificateDer<'static>>> {
    let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let found = read.map_err(|e| unreadable(what, path, &why_no_pem(&e)))?;
    if found.is_empty() {
        return Err(unreadable(what, path, &"there is no certificate in it"));
    }
    Ok(found)
}

fn verifier(root: Option<&str>, provider: &Arc<CryptoProvider>) -> Result<Arc<WebPkiServerVerifier>> {
    let mut roots = RootCertStore { roots: webpki_roots::TLS_SERVER_ROOTS.to_vec() };
    if let Some(path) = root {
        roots = RootCertStore::empty();
        for certificate in certificates("sslrootcert", path)? {
            roots.add(certificate).map_err(|e| unreadable("sslrootcert", path, &e))?;
        }
    }
    WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider.clone())
        .build()
        .map_err(|e| Error::invalid(format!("TLS: {e}")))
}

/// The usual verifier, less strict where the URL says so. Signatures of the handshake are always checked.
#[derive(Debug)]
struct Verifier {
    trust: Trust,
    inner: Arc<WebPkiServerVerifier>,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        use CertificateError::{NotValidForName, NotValidForNameContext};
        if self.trust == Trust::Anybody {
            return Ok(ServerCertVerified::assertion());
        }
        match self.inner.verify_server_cert(end_entity, intermediates, name, ocsp, now) {
            Err(rustls::Error::InvalidCertificate(NotValidForName | NotValidForNameContext { .. }))
                if self.trust == Trust::Signed =>
            {
                Ok(ServerCertVerified::assertion())
            }
            answer => answer,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls12_signature(message, certificate, signature, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
