//! `[memory]` and `[lane.memory]`: where OpenMemory is, and when not to wait for it. The gateway exists where the section
//! does.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use postrider::{LaneRules, Lanes};
use postrider_memories::note::check_space;
use postrider_memories::{LANE, Settings, Settling, lane_rules, lane_settings, upstream, usual_under_way};
use url::Url;

use super::file::{LaneKeys, MemoryKeys};
use super::tuning::Tuning;
use super::{Lane, Place, part_lane, says_where};
use crate::couriers::Destination;
use crate::failure::Result;
use crate::secret;

const DEFAULT_SPACE: &str = "team:default";

/// The gateway, as configured.
#[derive(Debug)]
pub struct MemoryConfig {
    pub settings: Settings,
    /// Its part in the settle, shared with the store.
    pub settling: Settling,
    /// Servers and workers make memories of new commits by themselves.
    pub consume_scm: bool,
    /// OpenMemory's address is guarded as those of webhooks are.
    pub guard: bool,
}

pub(super) fn read(place: &Place, keys: &MemoryKeys) -> Result<MemoryConfig> {
    let url = match &keys.url {
        None => None,
        Some(given) => {
            let wrong = || place.wrong(given.span(), "url is where OpenMemory is, like \"http://127.0.0.1:8080\"");
            let url = Url::parse(given.get_ref()).map_err(|_| wrong())?;
            let web = matches!(url.scheme(), "http" | "https") && url.has_host();
            if !web
                || url.query().is_some()
                || url.fragment().is_some()
                || !url.username().is_empty()
                || url.password().is_some()
            {
                return Err(wrong());
            }
            Some(url)
        }
    };
    let key: upstream::KeySource = match &keys.api_key {
        None => Arc::new(|| Ok(None)),
        Some(given) if !secret::is_reference(given.get_ref()) => {
            let what = "api_key must not stand here in plain text; write where it is kept: \"env:NAME\", \"file:PATH\" or \"exec:COMMAND\"";
            return Err(place.wrong(given.span(), what));
        }
        Some(given) => {
            let reference = given.get_ref().clone();
            secret::resolve(&reference).map_err(|e| place.wrong(given.span(), e))?;
            Arc::new(move || secret::resolve(&reference).map(Some))
        }
    };
    let default_space = match &keys.default_space {
        None => DEFAULT_SPACE.to_owned(),
        Some(given) => {
            check_space(given.get_ref()).map_err(|e| place.wrong(given.span(), e))?;
            given.get_ref().clone()
        }
    };
    let timeout = Duration::from_millis(keys.timeout_ms.map_or(5000, |ms| ms.0.into()));
    let breaker = keys.breaker.as_ref();
    let settings = Settings {
        upstream: upstream::Settings { url, key, timeout, resolver: None },
        default_space,
        max_bytes: LaneRules::default().max_payload_bytes,
        breaker_failures: breaker.and_then(|b| b.failures).map_or(3, |n| n.0),
        probe: breaker.and_then(|b| b.probe_sec).map_or(Duration::from_secs(5), |s| s.0),
        recognise: true,
        under_way: keys.doubt_sec.map_or_else(|| usual_under_way(timeout), |s| s.0),
    };
    upstream::OpenMemory::new(settings.upstream.clone())
        .map_err(|e| place.wrong(keys.api_key.as_ref().map_or(0..0, |key| key.span()), e))?;
    let consume_scm = keys.consume_scm.unwrap_or(false);
    Ok(MemoryConfig { settings, settling: Settling::default(), consume_scm, guard: keys.guard.unwrap_or(false) })
}

/// `[lane.memory]`: where memories go is said in `[memory]`.
pub(super) fn lane(
    place: &Place,
    at: Range<usize>,
    keys: &LaneKeys,
    common: &Tuning,
    environment: &Tuning,
    memory: &mut MemoryConfig,
) -> Result<Lane> {
    if says_where(keys) || keys.audit.is_some() {
        let what = "[lane.memory] takes no courier, url, timeout_ms, headers, statuses, guard, show_payload, dedup, audit or key_ttl; where memories go is set in [memory], and they are always deduplicated and audited";
        return Err(place.wrong(at, what));
    }
    let usual = lane_rules(&memory.settling);
    let usual = LaneRules { retention: keys.retention.map_or(usual.retention, |s| s.0), ..usual };
    let (rules, settings) = part_lane(place, keys, usual, lane_settings(), [common, environment])?;
    Lanes::new().with(LANE, rules.clone()).check().map_err(|e| place.wrong(at, e))?;
    memory.settings.max_bytes = rules.max_payload_bytes;
    Ok(Lane { rules, settings, destination: Destination::Memory, max_age: keys.max_age.map(|span| span.0) })
}
