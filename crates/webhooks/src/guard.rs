//! The address guard: which URLs a subscription may have, and which addresses are connected to. A name is judged by what it
//! resolves to, at the moment of connecting, and exactly those addresses are used.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::str::FromStr;
use std::sync::Arc;

use hickory_resolver::TokioResolver;
use hickory_resolver::config::{NameServerConfig, ResolverConfig, ResolverOpts};
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use postrider::couriers::exchange::{Forbidden, Resolve};
use postrider::tx::BoxFuture;
use url::{Host, Url};

/// A range of addresses, like `10.0.0.0/8`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cidr {
    address: IpAddr,
    bits: u8,
}

impl FromStr for Cidr {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || "a range of addresses is written like 10.0.0.0/8 or fd00::/8".to_owned();
        let (address, bits) = text.split_once('/').ok_or_else(wrong)?;
        let address: IpAddr = address.parse().map_err(|_| wrong())?;
        let bits: u8 = bits.parse().map_err(|_| wrong())?;
        let most = if address.is_ipv4() { 32 } else { 128 };
        if bits > most { Err(wrong()) } else { Ok(Cidr { address, bits }) }
    }
}

impl Cidr {
    pub fn contains(&self, address: IpAddr) -> bool {
        match (self.address, address) {
            (IpAddr::V4(own), IpAddr::V4(other)) => {
                in_range(own.to_bits().into(), other.to_bits().into(), 32 - self.bits)
            }
            (IpAddr::V6(own), IpAddr::V6(other)) => in_range(own.to_bits(), other.to_bits(), 128 - self.bits),
            _ => false,
        }
    }
}

fn in_range(a: u128, b: u128, low_bits: u8) -> bool {
    low_bits >= 128 || a >> low_bits == b >> low_bits
}

const fn v4(a: u8, b: u8, c: u8, d: u8, bits: u8) -> Cidr {
    Cidr { address: IpAddr::V4(Ipv4Addr::new(a, b, c, d)), bits }
}

const fn v6(a: u16, b: u16, bits: u8) -> Cidr {
    Cidr { address: IpAddr::V6(Ipv6Addr::new(a, b, 0, 0, 0, 0, 0, 0)), bits }
}

/// Every special-purpose range of IPv4.
const CLOSED_V4: [Cidr; 15] = [
    v4(0, 0, 0, 0, 8),
    v4(10, 0, 0, 0, 8),
    v4(100, 64, 0, 0, 10),
    v4(127, 0, 0, 0, 8),
    v4(169, 254, 0, 0, 16),
    v4(172, 16, 0, 0, 12),
    v4(192, 0, 0, 0, 24),
    v4(192, 0, 2, 0, 24),
    v4(192, 88, 99, 0, 24),
    v4(192, 168, 0, 0, 16),
    v4(198, 18, 0, 0, 15),
    v4(198, 51, 100, 0, 24),
    v4(203, 0, 113, 0, 24),
    v4(224, 0, 0, 0, 4),
    v4(240, 0, 0, 0, 4),
];
/// Of IPv6 only global unicast is open, and of that not these.
const OPEN_V6: Cidr = v6(0x2000, 0, 3);
const CLOSED_V6: [Cidr; 4] = [v6(0x2001, 0, 23), v6(0x2001, 0xdb8, 32), v6(0x2002, 0, 16), v6(0x3fff, 0, 20)];
const NAT64: Cidr = v6(0x64, 0xff9b, 96);
/// Where clouds keep credentials and speak to their machines: closed even within ranges that were opened.
const METADATA_V4: [Ipv4Addr; 11] = [
    Ipv4Addr::new(169, 254, 169, 254), // most of them
    Ipv4Addr::new(169, 254, 169, 253), // AWS: names
    Ipv4Addr::new(169, 254, 169, 123), // AWS: time
    Ipv4Addr::new(169, 254, 170, 2),   // AWS: tasks
    Ipv4Addr::new(169, 254, 170, 23),  // AWS: pods
    Ipv4Addr::new(169, 254, 0, 23),    // Tencent
    Ipv4Addr::new(169, 254, 10, 10),   // Tencent
    Ipv4Addr::new(169, 254, 42, 42),   // Scaleway
    Ipv4Addr::new(100, 100, 100, 200), // Alibaba
    Ipv4Addr::new(168, 63, 129, 16),   // Azure
    Ipv4Addr::new(192, 0, 0, 192),     // Oracle
];
const METADATA_V6: [Ipv6Addr; 5] = [
    Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254),      // AWS
    Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x23),       // AWS: pods
    Ipv6Addr::new(0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254),       // Google
    Ipv6Addr::new(0xfd00, 0xc1, 0, 0, 0, 0, 0xa9fe, 0xa9fe), // Oracle
    Ipv6Addr::new(0xfd00, 0x42, 0, 0, 0, 0, 0, 0x42),        // Scaleway
];

fn is_metadata(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => METADATA_V4.contains(&v4),
        IpAddr::V6(v6) => METADATA_V6.contains(&v6),
    }
}

/// What may be connected to.
#[derive(Clone, Debug, Default)]
pub struct Policy {
    pub allow_http: bool,
    pub allow_cidrs: Vec<Cidr>,
}

impl Policy {
    pub fn judge(&self, address: IpAddr) -> Result<(), Forbidden> {
        let closed = || Forbidden("the address is not one that webhooks are sent to".to_owned());
        if is_metadata(address) || embedded(address).is_some_and(is_metadata) {
            return Err(closed());
        }
        if self.allow_cidrs.iter().any(|range| range.contains(address)) {
            return Ok(());
        }
        let open = match address {
            IpAddr::V4(_) => !CLOSED_V4.iter().any(|range| range.contains(address)),
            // A NAT64 gateway connects to the address inside.
            IpAddr::V6(inner) if NAT64.contains(address) => return self.judge(IpAddr::V4(low_bits(inner))),
            IpAddr::V6(_) => OPEN_V6.contains(address) && !CLOSED_V6.iter().any(|range| range.contains(address)),
        };
        if open { Ok(()) } else { Err(closed()) }
    }

    /// A URL as a subscription may have it. What its name resolves to is judged later, at every connect.
    pub fn check_url(&self, text: &str) -> Result<Url, String> {
        let mut url = Url::parse(text).map_err(|e| format!("the url is none ({e}); write it as https://host/path"))?;
        match url.scheme() {
            "https" => {}
            "http" if self.allow_http => {}
            "http" => {
                return Err(
                    "the url must begin with https:// (or set [webhooks] allow_http for private networks)".into()
                );
            }
            other => return Err(format!("webhooks are sent by https, not by `{other}`")),
        }
        if !url.username().is_empty() || url.password().is_some() {
            return Err("the url has credentials in it; send them as a header instead".into());
        }
        match url.host() {
            None => return Err("the url has no host".into()),
            Some(Host::Ipv4(address)) => self.judge(address.into()).map_err(|e| e.0)?,
            Some(Host::Ipv6(address)) => self.judge(address.into()).map_err(|e| e.0)?,
            Some(Host::Domain(name)) => check_name(name)?,
        }
        url.set_fragment(None);
        Ok(url)
    }
}

fn check_name(name: &str) -> Result<(), String> {
    let bare = name.trim_end_matches('.');
    let internal = [".local", ".internal", ".localhost", ".localdomain"].iter().any(|end| bare.ends_with(end));
    if !bare.contains('.') || internal {
        return Err("the host must be a full, public name, like hooks.example.com".into());
    }
    Ok(())
}

/// The IPv4 address that an IPv6 one carries: mapped, compatible, NAT64.
fn embedded(address: IpAddr) -> Option<IpAddr> {
    let IpAddr::V6(v6) = address else { return None };
    let carries = v6.to_ipv4().is_some() || NAT64.contains(address);
    carries.then(|| IpAddr::V4(low_bits(v6)))
}

fn low_bits(address: Ipv6Addr) -> Ipv4Addr {
    Ipv4Addr::from_bits(address.to_bits() as u32)
}

/// Resolves names by DNS alone, without search domains, and refuses an answer with any forbidden address in it.
pub struct Guarded {
    policy: Policy,
    resolver: Arc<TokioResolver>,
}

impl Guarded {
    /// With the system's name servers, or these.
    pub fn new(policy: Policy, servers: &[SocketAddr]) -> Result<Self, String> {
        let wrong = |e: &dyn std::fmt::Display| format!("names cannot be resolved here: {e}");
        let provider = TokioRuntimeProvider::default();
        let mut builder = if servers.is_empty() {
            TokioResolver::builder(provider).map_err(|e| wrong(&e))?
        } else {
            let mut config = ResolverConfig::from_parts(None, vec![], vec![]);
            for server in servers {
                let mut name_server = NameServerConfig::udp_and_tcp(server.ip());
                name_server.connections.iter_mut().for_each(|connection| connection.port = server.port());
                config.add_name_server(name_server);
            }
            TokioResolver::builder_with_config(config, provider)
        };
        let options: &mut ResolverOpts = builder.options_mut();
        // What was judged must be what is connected to, so an answer is never older than its TTL.
        options.attempts = 2;
        let resolver = builder.build().map_err(|e| wrong(&e))?;
        Ok(Guarded { policy, resolver: Arc::new(resolver) })
    }
}

impl Resolve for Guarded {
    fn permit(&self, address: IpAddr) -> Result<(), Forbidden> {
        self.policy.judge(address)
    }

    fn resolve(&self, name: String) -> BoxFuture<'static, io::Result<Vec<SocketAddr>>> {
        let (policy, resolver) = (self.policy.clone(), self.resolver.clone());
        Box::pin(async move {
            // With a dot at its end a name is looked up as it is, in no search domain.
            let absolute = format!("{}.", name.trim_end_matches('.'));
            let answer = resolver.lookup_ip(absolute).await.map_err(io::Error::other)?;
            let addresses: Vec<IpAddr> = answer.iter().collect();
            if let Some(forbidden) = addresses.iter().find_map(|address| policy.judge(*address).err()) {
                return Err(io::Error::other(forbidden));
            }
            Ok(addresses.into_iter().map(|address| SocketAddr::new(address, 0)).collect())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy() -> Policy {
        Policy { allow_http: true, allow_cidrs: vec![] }
    }

    #[test]
    fn every_special_range_is_closed_at_both_ends() {
        for range in CLOSED_V4 {
            let IpAddr::V4(first) = range.address else { unreachable!() };
            let last = Ipv4Addr::from_bits(first.to_bits() | (u32::MAX.checked_shr(range.bits.into()).unwrap_or(0)));
            for address in [first, last] {
                assert!(policy().judge(address.into()).is_err(), "{address}");
                // However it is embedded.
                let mapped = address.to_ipv6_mapped();
                let compatible = Ipv6Addr::from_bits(address.to_bits().into());
                let nat64 = Ipv6Addr::from_bits((0x64_ff9b_u128 << 96) | u128::from(address.to_bits()));
                let sixtofour = Ipv6Addr::from_bits((0x2002_u128 << 112) | (u128::from(address.to_bits()) << 80));
                let siit = Ipv6Addr::from_bits((0xffff_u128 << 48 << 16) | u128::from(address.to_bits()));
                for v6 in [mapped, compatible, nat64, sixtofour, siit] {
                    assert!(policy().judge(v6.into()).is_err(), "{v6}");
                }
            }
        }
        // Written out: whoever takes a range away is to be told.
        for closed in [
            "0.1.2.3",
            "10.255.255.255",
            "100.64.0.0",
            "100.127.255.255",
            "127.0.0.1",
            "169.254.0.1",
            "172.16.0.0",
            "172.31.255.255",
            "192.0.0.8",
            "192.0.2.1",
            "192.88.99.1",
            "192.168.0.1",
            "198.18.0.0",
            "198.19.255.255",
            "198.51.100.1",
            "203.0.113.1",
            "224.0.0.1",
            "239.255.255.255",
            "240.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "fc00::1",
            "fd12::1",
            "fe80::1",
            "fec0::1",
            "ff02::1",
            "2001::1",
            "2001:db8::1",
            "2002::1",
            "3fff::1",
            "fd00:ec2::254",
            "64:ff9b:1::1",
            "::ffff:0:8.8.8.8",
        ] {
            assert!(policy().judge(closed.parse().unwrap()).is_err(), "{closed}");
        }
        for open in [
            "8.8.8.8",
            "1.1.1.1",
            "172.32.0.1",
            "192.0.1.1",
            "100.128.0.1",
            "2606:4700::1",
            "2a00:1450::1",
            "64:ff9b::808:808",
        ] {
            assert!(policy().judge(open.parse().unwrap()).is_ok(), "{open}");
        }
    }

    #[test]
    fn every_notation_of_a_forbidden_host_is_refused() {
        let mut hosts: Vec<String> = vec![];
        for address in ["127.0.0.1", "169.254.169.254", "10.1.2.3", "0.0.0.0", "192.168.0.1"] {
            let ip: Ipv4Addr = address.parse().unwrap();
            let (n, [a, b, c, d]) = (ip.to_bits(), ip.octets());
            hosts.extend([
                address.to_owned(),
                format!("{address}."),
                format!("{n}"),
                format!("0x{n:x}"),
                format!("0{n:o}"),
                format!("0x{a:x}.0x{b:x}.0x{c:x}.0x{d:x}"),
                format!("0{a:o}.0{b:o}.0{c:o}.0{d:o}"),
                format!("{a}.{}", n & 0xff_ffff),
                format!("{a}.{b}.{}", n & 0xffff),
                format!("[::ffff:{address}]"),
                format!("[::{address}]"),
                format!("[64:ff9b::{address}]"),
                format!("[{}]", ip.to_ipv6_mapped()),
                format!("%{:x}%{:x}", b'0', b'x') + &format!("{n:x}"),
                format!("１２７.{b}.{c}.{d}").replace("１２７", if a == 127 { "１２７" } else { "１０" }),
            ]);
        }
        hosts.extend(
            [
                "0x7f.1",
                "127.1",
                "2130706433",
                "localhost",
                "localhost.",
                "LOCALHOST",
                "intranet",
                "[::1]",
                "[::]",
                "db.local",
                "x.internal",
            ]
            .map(str::to_owned),
        );
        for host in hosts {
            let url = format!("http://{host}/hook");
            assert!(policy().check_url(&url).is_err(), "{url} was taken");
        }
    }

    #[test]
    fn only_plain_https_urls_are_taken() {
        let strict = Policy::default();
        assert_eq!(
            strict.check_url("https://hooks.example.com/in?x=1#f").unwrap().as_str(),
            "https://hooks.example.com/in?x=1"
        );
        for wrong in [
            "http://hooks.example.com/",
            "ftp://example.com/",
            "https://user:pw@example.com/",
            "https://",
            "nonsense",
            "https://example",
            "file:///etc/passwd",
        ] {
            assert!(strict.check_url(wrong).is_err(), "{wrong}");
        }
        assert!(policy().check_url("http://hooks.example.com/").is_ok());
    }

    #[test]
    fn opened_ranges_open_all_but_metadata() {
        let open = Policy {
            allow_http: true,
            allow_cidrs: ["127.0.0.0/8", "169.254.0.0/16", "fd00::/8"].map(|c| c.parse().unwrap()).to_vec(),
        };
        assert!(open.judge("127.0.0.1".parse().unwrap()).is_ok());
        assert!(open.judge("169.254.1.1".parse().unwrap()).is_ok());
        for metadata in ["169.254.169.254", "fd00:ec2::254", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe"] {
            assert!(open.judge(metadata.parse().unwrap()).is_err(), "{metadata}");
        }
        assert!(open.judge("10.0.0.1".parse().unwrap()).is_err());
        let everything = ["0.0.0.0/0", "::/0"].map(|c| c.parse().unwrap()).to_vec();
        let everything = Policy { allow_http: true, allow_cidrs: everything };
        assert!(everything.judge("10.0.0.1".parse().unwrap()).is_ok());
        let metadata = [
            "169.254.169.254",
            "169.254.169.253",
            "169.254.169.123",
            "169.254.170.2",
            "169.254.170.23",
            "169.254.0.23",
            "169.254.10.10",
            "169.254.42.42",
            "100.100.100.200",
            "168.63.129.16",
            "192.0.0.192",
            "fd00:ec2::254",
            "fd00:ec2::23",
            "fd20:ce::254",
            "fd00:c1::a9fe:a9fe",
            "fd00:42::42",
        ];
        for address in metadata.map(|text| text.parse::<IpAddr>().unwrap()) {
            assert!(everything.judge(address).is_err() && policy().judge(address).is_err(), "{address}");
            if let IpAddr::V4(v4) = address {
                assert!(everything.judge(v4.to_ipv6_mapped().into()).is_err(), "{address}");
                let url = format!("http://{v4}/");
                assert!(everything.check_url(&url).is_err(), "{url}");
            }
        }
        for wrong in ["10.0.0.0", "10.0.0.0/33", "x/8", "::/129"] {
            assert!(wrong.parse::<Cidr>().is_err(), "{wrong}");
        }
    }
}
