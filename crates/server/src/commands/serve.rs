//! `postrider serve`: the API and the workers in one process, until a signal.

use std::net::SocketAddr;
use std::sync::Arc;

use postrider::Outbox;
use postrider::observe::Observer;
use postrider::stores::why_no_pem;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;

use super::worker::{build, consume, orchestrate, reap, tend};
use crate::alerts;
use crate::cli::Serve;
use crate::config::{AuthMode, Config, TlsFiles};
use crate::database;
use crate::doctor::Doctor;
use crate::failure::{Ending, Failure, Result};
use crate::http::{self, Access, App, Limits};
use crate::metrics::Meters;
use crate::output::{Output, print_aside};
use crate::parts::Parts;
use crate::roll::Roll;
use crate::signals::stop_signal;
use crate::tokens::Tokens;
use crate::traces::Traces;
use crate::writes;

pub async fn run(config: &Config, args: Serve, output: Output) -> Result<Ending> {
    let signal = stop_signal()?;
    let address = args.listen.unwrap_or(config.listen);
    let tls = config.tls.as_ref().map(acceptor).transpose()?;
    let limits = within_file_limit(&config.http);
    let outbox = database::open_migrated(config).await?;
    let tokens_required = check_access(config, address, &outbox).await?;
    let listener = TcpListener::bind(address)
        .await
        .map_err(|e| Failure::usage(format!("cannot listen on {address}: {e}; choose another with --listen")))?;
    let address = listener.local_addr().unwrap_or(address);

    let meters = Arc::new(Meters::new());
    let traces = Traces::configured(config)?;
    let parts = Parts::open(config, &outbox).await?;
    let app = App::new(
        outbox.clone(),
        parts.clone(),
        config.orders.strict,
        config.gate.clone(),
        Access { tokens_required, tls: tls.is_some(), session_ttl: config.session_ttl },
        meters.clone(),
        Doctor::new(config, &outbox, &parts),
    );
    app.warn_of_gate();
    database::warn(config);
    let (stop, stopped) = watch::channel(false);
    let stopping = |mut stopped: watch::Receiver<bool>| async move { drop(stopped.wait_for(|stop| *stop).await) };
    // Before the workers: what dies from now on is told.
    let alerting = alerts::watch(config, &outbox);
    let workers = if config.enabled && !args.no_workers {
        let lanes: Vec<_> = config.lanes.iter().map(|(name, lane)| (name.as_str(), lane)).collect();
        let worker = build(config, &outbox, &parts, &lanes, output, traces.as_ref()).await?;
        let names: Vec<&str> = lanes.iter().map(|(name, _)| *name).collect();
        let (roll, calling) = Roll::start(&outbox, worker.owner(), &names, stopped.clone());
        let mut observers: Vec<Arc<dyn Observer>> = vec![meters, roll];
        observers.extend(traces.clone().map(|traces| traces as Arc<dyn Observer>));
        let worker = worker.observer(Arc::new(observers));
        let orchestrator = orchestrate(&parts.webhooks, stopped.clone());
        let idle = [Some(reap(&parts.orders)), consume(config, &outbox, &parts)];
        Some((tokio::spawn(worker.run(stopping(stopped.clone()))), [orchestrator, calling], idle))
    } else {
        let why = if config.enabled { "--no-workers" } else { "switched off by OUTBOX_ENABLED or [outbox] enabled" };
        tracing::warn!("no workers here ({why}): messages are taken in and delivered by other processes");
        None
    };
    // The breaker of this process needs looking after, whoever delivers.
    let tending = parts.memories.as_ref().map(|memories| tend(memories, true, stopped.clone()));
    let sampling = app.live.start(stopped.clone());
    let examining = app.doctor.start(config.doctor_every, stopped.clone());
    let writing = writes::watch(&outbox, stopped.clone());
    tokio::spawn(async move {
        signal.await;
        let _ = stop.send(true);
    });
    let scheme = if tls.is_some() { "https" } else { "http" };
    print_aside(format!("listening on {scheme}://{address}"));
    http::serve(listener, tls, http::router(&app), limits, config.drain, stopping(stopped)).await;
    if let Some((workers, tasks, idle)) = workers {
        idle.into_iter().flatten().for_each(|task| task.abort());
        for task in tasks {
            let _ = task.await;
        }
        workers.await.map_err(|e| Failure::failed(format!("the workers ended badly: {e}")))??;
    }
    let _ = sampling.await;
    examining.abort();
    let _ = writing.await;
    if let Some(tending) = tending {
        let _ = tending.await;
    }
    if let Some(alerting) = alerting {
        alerting.abort();
    }
    if let Some(traces) = traces {
        traces.end().await;
    }
    outbox.flush().await;
    Ok(Ending::Done)
}

/// Are tokens needed? Refuses to be open to everybody.
pub async fn check_access(config: &Config, address: SocketAddr, outbox: &Outbox) -> Result<bool> {
    let required = config.auth == AuthMode::Always || !address.ip().is_loopback();
    if required && !Tokens::new(outbox.clone()).any().await? {
        return Err(Failure::usage(format!(
            "on {address} the API needs tokens, and there is none; make one first: postrider token create --scope admin"
        )));
    }
    Ok(required)
}

fn acceptor(files: &TlsFiles) -> Result<TlsAcceptor> {
    let wrong = |what: &str, path: &std::path::Path, e: &dyn std::fmt::Display| {
        Failure::usage(format!(
            "[tls] {what} = \"{}\" cannot be used: {e}; it must be a readable PEM file",
            path.display()
        ))
    };
    let chain = CertificateDer::pem_file_iter(&files.cert)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|e| wrong("cert", &files.cert, &why_no_pem(&e)))?;
    let key = PrivateKeyDer::from_pem_file(&files.key).map_err(|e| wrong("key", &files.key, &why_no_pem(&e)))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|e| Failure::failed(format!("TLS: {e}")))?
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .map_err(|e| wrong("cert", &files.cert, &e))?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

/// Of open files, for all that is no connection of a client's: databases, deliveries, logs.
const OTHER_FILES: usize = 512;

/// A shell's usual limit of 1024 open files is less than the connections we bear: raises it as far as that goes, and bears
/// no more than fit. A connection that cannot be accepted would be no probe's either.
fn within_file_limit(limits: &Limits) -> Limits {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let now = getrlimit(Resource::Nofile);
    let wanted = limits.slots.most + http::RESERVE + OTHER_FILES;
    let enough = |files: Option<u64>| files.is_none_or(|files| files >= wanted as u64);
    let mut files = now.current;
    if !enough(files) {
        let raised = if enough(now.maximum) { Some(wanted as u64) } else { now.maximum };
        if setrlimit(Resource::Nofile, Rlimit { current: raised, maximum: now.maximum }).is_ok() {
            files = raised;
        }
    }
    let Some(files) = files.filter(|files| *files < wanted as u64) else { return limits.clone() };
    let fitting = fitting(limits, files as usize);
    tracing::warn!(
        files,
        connections = fitting.slots.most,
        per_peer = fitting.slots.per_peer,
        "the limit of open files (ulimit -n) allows fewer connections than [http] does"
    );
    fitting
}

/// As many connections as fit; one peer keeps its part of them.
fn fitting(limits: &Limits, files: usize) -> Limits {
    let most = files.saturating_sub(http::RESERVE + OTHER_FILES).max(files / 4).clamp(1, limits.slots.most);
    let mut fitting = limits.clone();
    fitting.slots.reserve = fitting.slots.reserve.min((files / 8).max(1));
    if limits.slots.per_peer > 0 {
        fitting.slots.per_peer = (limits.slots.per_peer * most / limits.slots.most).max(1);
    }
    fitting.slots.most = most;
    fitting
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_few_files_can_be_open_one_peer_still_has_only_its_part() {
        let few = fitting(&Limits::default(), 4096);
        assert_eq!((few.slots.most, few.slots.per_peer), (3328, 832));
        let fewer = fitting(&Limits::default(), 256);
        assert_eq!((fewer.slots.most, fewer.slots.per_peer, fewer.slots.reserve), (64, 16, 32));
        assert_eq!(few.slots.reserve, 256);
    }
}
