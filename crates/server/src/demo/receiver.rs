//! A small HTTP receiver that keeps a log of its own. It is moody: some invoices it takes only at the second or third
//! attempt, and one it does not understand until it is mended.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hyper::StatusCode;

use crate::failure::Result;
use crate::loopback;

/// One request as the receiver saw it, and what it answered.
#[derive(Clone, Debug)]
pub struct Arrival {
    pub idempotency_key: String,
    pub invoice: u64,
    pub status: u16,
}

impl Arrival {
    pub fn taken(&self) -> bool {
        self.status == 200
    }
}

/// The receiver's side of the story.
#[derive(Clone, Default)]
pub struct Receiver {
    log: Arc<Mutex<(Vec<Arrival>, bool)>>,
    pub url: String,
}

impl Receiver {
    pub async fn start() -> Result<Self> {
        let receiver = Receiver::default();
        let log = receiver.clone();
        let address = loopback::receive(move |headers, body| {
            let log = log.clone();
            async move {
                tokio::time::sleep(Duration::from_millis(10)).await; // it has work to do, too
                let header = |name| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
                let attempt = header("postrider-attempt").parse().unwrap_or(1);
                log.judge(header("idempotency-key").to_owned(), attempt, &body)
            }
        });
        Ok(Receiver { url: format!("http://{}/invoices", address.await?), ..receiver })
    }

    pub fn arrivals(&self) -> Vec<Arrival> {
        self.lock().0.clone()
    }

    /// From now on it understands everything.
    pub fn mend(&self) {
        self.lock().1 = true;
    }

    fn lock(&self) -> MutexGuard<'_, (Vec<Arrival>, bool)> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn judge(&self, idempotency_key: String, attempt: u32, body: &[u8]) -> StatusCode {
        let body: serde_json::Value = serde_json::from_slice(body).unwrap_or_default();
        let invoice = body["invoice"].as_u64().unwrap_or(0);
        let mut log = self.lock();
        let status = match invoice {
            _ if body["amount"].is_null() && !log.1 => StatusCode::UNPROCESSABLE_ENTITY,
            n if n % 7 == 0 && attempt == 1 => StatusCode::SERVICE_UNAVAILABLE,
            n if n % 11 == 0 && attempt <= 2 => StatusCode::INTERNAL_SERVER_ERROR,
            _ => StatusCode::OK,
        };
        log.0.push(Arrival { idempotency_key, invoice, status: status.as_u16() });
        status
    }
}
