//! TLS to PostgreSQL, with a server of our own whose certificate a private authority signed.

use proving::servers::Postgres;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};

use crate::home::Home;

struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Authority { issuer: CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap() }
    }

    /// A certificate for `localhost`, and its key.
    fn sign(&self) -> (String, String) {
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
