//! Review of tokens before each request of an API.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::http::Request;

use crate::review::reviewable;
use crate::service::Service;

/// Calls [`Reviewed::learn`](crate::review::Reviewed::learn) before each request of an API.
#[derive(Clone, Debug)]
pub(crate) struct Learning<S> {
    pub(crate) inner: S,
    pub(crate) service: Arc<Service>,
}

impl<S, B> tower::Service<Request<B>> for Learning<S>
where
    S: tower::Service<Request<B>> + Clone + Send + 'static,
    S::Future: Send,
    B: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<S::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        // The instance that was polled ready must be the one that is called.
        let next = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, next);
        if reviewable(request.headers()).is_none() {
            return Box::pin(inner.call(request));
        }
        let service = self.service.clone();
        Box::pin(async move {
            service.reviewed.learn(request.headers(), &service.registry).await;
            inner.call(request).await
        })
    }
}
