//! `runtime.v1.ImageService`.

use coracle_proto::cri::image_service_server::ImageService;
use coracle_proto::cri::*;
use tonic::{Request, Status};

use super::{Replies, Reply, Service, chunked, reply};
use crate::refusal::Refusal;

fn image_of(spec: Option<ImageSpec>) -> Result<ImageSpec, Status> {
    let spec = spec.unwrap_or_default();
    if spec.image.is_empty() {
        return Err(Refusal::invalid("image", "its name is empty").into());
    }
    Ok(spec)
}

#[tonic::async_trait]
impl ImageService for Service {
    async fn list_images(&self, request: Request<ListImagesRequest>) -> Reply<ListImagesResponse> {
        let filter = request.into_inner().filter.and_then(|filter| filter.image);
        reply(ListImagesResponse { images: self.0.list_images(filter.as_ref()).await? })
    }

    async fn image_status(&self, request: Request<ImageStatusRequest>) -> Reply<ImageStatusResponse> {
        let image = image_of(request.into_inner().image)?;
        reply(ImageStatusResponse { image: self.0.image_status(&image).await?, ..Default::default() })
    }

    async fn pull_image(&self, request: Request<PullImageRequest>) -> Reply<PullImageResponse> {
        let PullImageRequest { image, auth, sandbox_config } = request.into_inner();
        let namespace = sandbox_config.and_then(|config| config.metadata).unwrap_or_default().namespace;
        let image_ref = self.0.pull_image(&image_of(image)?, auth, &namespace).await?;
        reply(PullImageResponse { image_ref })
    }

    async fn remove_image(&self, request: Request<RemoveImageRequest>) -> Reply<RemoveImageResponse> {
        self.0.remove_image(&image_of(request.into_inner().image)?).await?;
        reply(RemoveImageResponse {})
    }

    async fn image_fs_info(&self, _: Request<ImageFsInfoRequest>) -> Reply<ImageFsInfoResponse> {
        reply(self.0.image_fs_info().await?)
    }

    type StreamImagesStream = Replies<StreamImagesResponse>;

    async fn stream_images(&self, request: Request<StreamImagesRequest>) -> Reply<Self::StreamImagesStream> {
        let filter = request.into_inner().filter.and_then(|filter| filter.image);
        chunked(self.0.list_images(filter.as_ref()).await?, |images| StreamImagesResponse { images })
    }
}
