//! TLS to PostgreSQL and to our own server, with certificates a private authority signed; HTTP/2 over it.

use proving::servers::Postgres;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};

use crate::api::Server;
use crate::home::Home;

pub struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

impl Authority {
    pub fn new() -> Self {
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Authority { issuer: CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap() }
    }

    /// A certificate for `localhost`, and its key.
    pub fn sign(&self) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        (params.signed_by(&key, &self.issuer).unwrap().pem(), key.serialize_pem())
    }
}

#[test]
fn postgres_is_asked_for_its_certificate_as_the_url_says() {
    let (authority, stranger) = (Authority::new(), Authority::new());
    let (certificate, key) = authority.sign();
    let mut server = Postgres::start().unwrap();
    server.speak_tls(&certificate, &key).unwrap();
    let home = Home::sqlite();
    home.write("ca.pem", &authority.issuer.pem()).write("stranger.pem", &stranger.issuer.pem()).write("empty.pem", "");
    let migrate = |host: &str, tls: &str| {
        let url = format!("postgres://postrider@{host}:{}/postgres?{tls}", server.port());
        home.run(&["--database", &url, "migrate"])
    };
    // Without a root, encrypted but unasked: as libpq does, and as Debian's own servers need it.
    for fine in ["", "sslmode=disable", "sslmode=prefer", "sslmode=require", "connect_timeout=5"] {
        migrate("127.0.0.1", fine).done();
    }
    migrate("localhost", "sslmode=verify-full&sslrootcert=ca.pem").done();
    migrate("localhost", "sslrootcert=ca.pem").done();
    migrate("127.0.0.1", "sslmode=verify-ca&sslrootcert=ca.pem").done();
    migrate("127.0.0.1", "sslmode=verify-full&sslrootcert=ca.pem").refused(3, &["not valid for name"]);
    migrate("localhost", "sslmode=verify-ca&sslrootcert=stranger.pem").refused(3, &["certificate"]);
    migrate("localhost", "sslmode=verify-full").refused(3, &["UnknownIssuer"]);
    migrate("localhost", "sslrootcert=nowhere.pem").refused(2, &["sslrootcert = nowhere.pem", "PEM"]);
    migrate("localhost", "sslrootcert=empty.pem").refused(2, &["no certificate in it"]);
    migrate("localhost", "sslcert=ca.pem").refused(2, &["sslkey"]);
    migrate("localhost", "sslmode=perhaps").refused(2, &["is no PostgreSQL URL"]);
}

/// One request over TLS, as the protocol that was agreed on; its status, and which protocol it was.
async fn ask(address: &str, authority: &Authority, protocols: &[&str]) -> (u16, Option<String>) {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(authority.issuer.der().clone()).unwrap();
    let provider = std::sync::Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let mut config = config.with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = protocols.iter().map(|p| p.as_bytes().to_vec()).collect();
    let stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let name = "localhost".try_into().unwrap();
    let stream = tokio_rustls::TlsConnector::from(std::sync::Arc::new(config)).connect(name, stream).await.unwrap();
    let agreed = stream.get_ref().1.alpn_protocol().map(|p| String::from_utf8_lossy(p).into_owned());
    let io = hyper_util::rt::TokioIo::new(stream);
    let request = http::Request::get(format!("https://localhost:{}/livez", address.rsplit(':').next().unwrap()))
        .header("host", address)
        .body(http_body_util::Empty::<bytes::Bytes>::new())
        .unwrap();
    let status = if agreed.as_deref() == Some("h2") {
        let executor = hyper_util::rt::TokioExecutor::new();
        let (mut sender, connection) = hyper::client::conn::http2::handshake(executor, io).await.unwrap();
        tokio::spawn(connection);
        sender.send_request(request).await.unwrap().status()
    } else {
        let (mut sender, connection) = hyper::client::conn::http1::handshake(io).await.unwrap();
        tokio::spawn(connection);
        sender.send_request(request).await.unwrap().status()
    };
    (status.as_u16(), agreed)
}

#[tokio::test(flavor = "multi_thread")]
async fn our_own_server_speaks_tls_and_both_versions_of_http() {
    let authority = Authority::new();
    let (certificate, key) = authority.sign();
    let home = Home::sqlite();
    home.write("cert.pem", &certificate).write("key.pem", &key);
    home.write("postrider.toml", "[tls]\ncert = \"cert.pem\"\nkey = \"key.pem\"\n");
    let server = Server::start(&home, &["--no-workers"]);
    assert_eq!(ask(&server.address, &authority, &["h2", "http/1.1"]).await, (200, Some("h2".into())));
    assert_eq!(ask(&server.address, &authority, &["http/1.1"]).await, (200, Some("http/1.1".into())));
    assert_eq!(ask(&server.address, &authority, &[]).await, (200, None));
    // Whoever speaks without it is not understood, and harms nobody.
    let plain = server.raw(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n");
    assert_eq!(plain.status, 0, "{plain:?}");
    assert_eq!(ask(&server.address, &authority, &["h2"]).await.0, 200);
    home.write("key.pem", "no key");
    home.run(&["serve", "--listen", "127.0.0.1:0"]).refused(2, &["[tls] key = \"key.pem\"", "PEM"]);
    // A key whose lines have run together is refused, and not repeated.
    home.write("key.pem", &key.replace('\n', ""));
    let refused = home.run(&["serve", "--listen", "127.0.0.1:0"]);
    assert_eq!(refused.code, 2, "{refused:?}");
    let middle = key.lines().nth(1).unwrap();
    let as_numbers: Vec<String> = middle.bytes().take(8).map(|byte| byte.to_string()).collect();
    assert!(!refused.stderr.contains(&middle[..8]) && !refused.stderr.contains(&as_numbers.join(", ")), "{refused:?}");
}
