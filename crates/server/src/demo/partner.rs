//! A partner with a webhook: at first it cannot take anything, then it is mended. It checks every signature, and keeps a log
//! of its own.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hyper::StatusCode;
use postrider_webhooks::sign;

use crate::failure::Result;
use crate::loopback;

/// One webhook as the partner saw it, and what it answered.
#[derive(Clone, Debug)]
pub struct Call {
    pub webhook_id: String,
    pub genuine: bool,
    pub status: u16,
}

#[derive(Default)]
struct Book {
    calls: Vec<Call>,
    secret: String,
    mended: bool,
}

#[derive(Clone, Default)]
pub struct Partner {
    book: Arc<Mutex<Book>>,
    pub url: String,
}

impl Partner {
    pub async fn start() -> Result<Self> {
        let partner = Partner::default();
        let own = partner.clone();
        let address = loopback::receive(move |headers, body| {
            let own = own.clone();
            async move {
                let header = |name| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
                let (id, at) = (header("webhook-id"), header("webhook-timestamp").parse().unwrap_or(0));
                let mut book = own.lock();
                let genuine = sign::verify(&book.secret, id, at, &body, header("webhook-signature"));
                let status = if book.mended { StatusCode::OK } else { StatusCode::INTERNAL_SERVER_ERROR };
                book.calls.push(Call { webhook_id: id.to_owned(), genuine, status: status.as_u16() });
                status
            }
        });
        Ok(Partner { url: format!("http://{}/hooks", address.await?), ..partner })
    }

    /// What it was told to check signatures with.
    pub fn trusts(&self, secret: &str) {
        self.lock().secret = secret.to_owned();
    }

    pub fn mend(&self) {
        self.lock().mended = true;
    }

    pub fn calls(&self) -> Vec<Call> {
        self.lock().calls.clone()
    }

    fn lock(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
